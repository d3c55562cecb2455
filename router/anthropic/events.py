"""A message as the events of a stream. Text, a piece for every token, is filled into a prepared event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvhive.router.anthropic.blocks import BlockCutter, Piece, block_start
from kvhive.router.anthropic.response import MessageShape, stop_of
from kvhive.router.anthropic.usage import usage_body
from kvhive.router.frontend import Delta, Finished, Usage

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(kind: str, **fields: object) -> bytes:
    """Return one server-sent event; JSON has no raw line breaks, so one data line is enough."""
    return named(kind, {"type": kind, **fields})


def named(kind: str, data: Mapping[str, Any]) -> bytes:
    """Return an event of this name with such data."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _ENCODER.encode(data).encode())


PING = event("ping")


class MessageEvents:
    """The events of one stream, in their order."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._cutter = BlockCutter()
        self._open = -1
        self._before = b""

    def begun(self, prompt_tokens: int) -> bytes:
        """Return the first one."""
        return event("message_start", message=self._shape.begun(prompt_tokens))

    def news(self, delta: Delta) -> bytes:
        """Return those of new output; b"" if it shows nothing."""
        return b"".join(self._piece(piece) for piece in self._cutter.push(delta))

    def ended(self, finished: Finished, usage: Usage) -> bytes:
        """Return the last ones."""
        reason, stop = stop_of(finished)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = event("message_delta", delta=delta, usage=usage_body(usage))
        return self._close() + last + event("message_stop")

    def _piece(self, piece: Piece) -> bytes:
        opening = b""
        if piece.opens:
            opening = self._close() + event(
                "content_block_start", index=piece.index, content_block=block_start(piece)
            )
            self._open = piece.index
            made = event("content_block_delta", index=piece.index, delta=_nothing(piece))
            self._before = made.removesuffix(_AFTER)
        if not piece.text:
            return opening
        return opening + self._before + _ENCODER.encode(piece.text).encode() + _AFTER[2:]

    def _close(self) -> bytes:
        return event("content_block_stop", index=self._open) if self._open >= 0 else b""


def _nothing(piece: Piece) -> dict[str, str]:
    """Return a delta of no text, which stands last in it."""
    if piece.call is None:
        return {"type": "text_delta", "text": ""}
    return {"type": "input_json_delta", "partial_json": ""}


_AFTER = b'""}}\n\n'
"""How an event of no text ends: the text, and what follows it."""
