"""Answers as server-sent events. News, one for every token, is filled into an event that was made before."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
DONE_EVENT = b"data: [DONE]\n\n"
BEAT = b": ping\n\n"
"""A comment, which readers of events skip."""


class NewsShape(Protocol):
    """The part of an AnswerShape that is needed here."""

    def news(self, index: int, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one piece of a stream."""
        ...


def sse_event(value: Mapping[str, Any]) -> bytes:
    """Return one server-sent event; JSON has no raw line breaks, so one data line is enough."""
    return b"data: " + _ENCODER.encode(value).encode() + b"\n\n"


class NewsEvents:
    """The news of one stream as events. Byte for byte what `sse_event` makes of the shape's pieces."""

    def __init__(self, shape: NewsShape, extra: Mapping[str, Any]) -> None:
        """Prepare; every piece has the fields of `extra` too."""
        self._shape = shape
        self._extra = dict(extra)
        self._around: dict[int, tuple[bytes, bytes]] = {}  # at most one per choice
        self._mark = secrets.token_hex(16)

    def event(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Return the event of one choice's new text."""
        if logprobs:
            return sse_event(self._shape.news(index, text, logprobs) | self._extra)
        around = self._around.get(index)
        if around is None:
            made = sse_event(self._shape.news(index, self._mark, ()) | self._extra)
            before, _, after = made.partition(f'"{self._mark}"'.encode())
            around = self._around[index] = before, after
        return b"".join((around[0], encode_basestring(text).encode(), around[1]))
