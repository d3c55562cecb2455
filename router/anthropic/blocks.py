"""An answer's content blocks: text and tool calls, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.strict_json import json_object
from kvhive.router.frontend import Delta, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one block."""

    index: int
    text: str
    """Of a text, or of a call's arguments."""
    opens: bool
    """Whether the block begins with it."""
    call: ToolCallDelta | None = None
    """The call that the block is; None: it is text."""


class BlockCutter:
    """Cuts what a choice brings into blocks, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._call: int | None = None

    def push(self, delta: Delta) -> Iterator[Piece]:
        """Yield what of it goes into which block."""
        if delta.text:
            yield self._piece(None, delta.text)
        for call in delta.tool_calls:
            yield self._piece(call, call.arguments)

    def _piece(self, call: ToolCallDelta | None, text: str) -> Piece:
        which = None if call is None else call.index
        opens = self._index < 0 or which != self._call
        self._index, self._call = self._index + opens, which
        return Piece(self._index, text, opens, call)


def block_start(piece: Piece) -> dict[str, Any]:
    """Return an empty block, for a piece that opens one."""
    if piece.call is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": piece.call.id, "name": piece.call.name, "input": {}}


def whole_blocks(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return all blocks of an answer. A call without whole arguments, as one cut off, has an empty input."""
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if piece.opens:
            blocks.append(block_start(piece))
            texts.append([])
        texts[piece.index].append(piece.text)
    for block, parts in zip(blocks, texts, strict=True):
        if block["type"] == "text":
            block["text"] = "".join(parts)
        else:
            block["input"] = _arguments("".join(parts))
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, if they are an object that an answer can hold.

    What Python reads, it need not be able to write: NaN, 1e999, half of a character.
    """
    try:
        return json_object("input", text)
    except InvalidRequest:
        return {}
