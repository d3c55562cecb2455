"""How much repeats in the bytes of a message of kvhive.v1, counted before anything parses them.

gRPC's own parser makes an object of every empty message: megabytes of them hold the event loop up for a
second, and leave gigabytes behind. This walks the same bytes by the .proto's descriptors, makes nothing, and
stops at the first field there is one too many of. What is overwritten later in a message counts, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_LOGIT_BIAS_ENTRIES, MAX_PINS
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.chat.messages import MAX_ALL_TOOL_CALLS, MAX_MESSAGES, MAX_TOOLS
from kvhive.router.sampling_params import MAX_STOP_TOKEN_IDS, MAX_STOPS

MAX_FIELDS = 65_536
"""Of a message, in all its depths: a request that has as many as it may of everything has fewer."""
FIELDS_AT_A_TIME = 1024
"""A walk pauses after so many, which take it half a millisecond."""
_COUNTED_BYTES = 64 * 1024
"""Of packed numbers, counted at a time."""
_UNFINISHED = bytes(range(128, 256))
"""Bytes that are not the last one of a number."""
_LENGTH = 2
"""Wire type of what says how long it is: texts, messages and packed numbers."""
_FIXED_BYTES = {1: 8, 5: 4}
_FIXED_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}


class NoMessage(Exception):
    """These bytes are no message at all, or have groups, which kvhive.v1 has none of."""


def wire_limits(max_context: int) -> dict[str, int]:
    """Return how many of each repeated field there may be in a request, by the field's full name."""
    limits: dict[tuple[type[Message], str], int] = {
        (pb.Chat, "messages"): MAX_MESSAGES,
        (pb.Chat, "tools"): MAX_TOOLS,
        (pb.ChatMessage, "tool_calls"): MAX_ALL_TOOL_CALLS,
        (pb.GenerateRequest, "pins"): MAX_PINS,
        (pb.SamplingParams, "stop"): MAX_STOPS,
        (pb.SamplingParams, "stop_token_ids"): MAX_STOP_TOKEN_IDS,
        (pb.SamplingParams, "logit_bias"): MAX_LOGIT_BIAS_ENTRIES,
        (pb.TokenIds, "ids"): max_context - 1,
        (pb.DetokenizeRequest, "token_ids"): max_context,
    }
    return {
        message.DESCRIPTOR.fields_by_name[name].full_name: most for (message, name), most in limits.items()
    }


@dataclass(eq=False, slots=True)
class _Known:
    """What a tag stands for in a message."""

    full_name: str
    path: str
    """As refusals call it."""
    most: int | None
    """In a whole request, where it repeats."""
    inner: dict[int, _Known] | None = None
    """What tags stand for in it, where it is a message."""
    packed_bytes: int | None = None
    """Of each number in it, 0 where they differ; None: it is not several numbers in one."""


@dataclass(slots=True)
class WireCounts:
    """Counts the messages of one type. Nothing here changes after its beginning, so walks may take turns."""

    request: type[Message]
    limits: Mapping[str, int]
    _root: dict[int, _Known] = field(init=False)

    def __post_init__(self) -> None:
        self._root = _tags(self.request.DESCRIPTOR, self.limits, "")

    def walk(self, raw: bytes) -> Iterator[None]:
        """Go through a message and pause now and then. Raises InvalidRequest at an excess, and NoMessage."""
        try:
            yield from _Walk(raw).through(self._root)
        except IndexError as error:
            raise NoMessage from error


def _tags(descriptor: Any, limits: Mapping[str, int], path: str) -> dict[int, _Known]:
    """Return what tags stand for in a message; none of ours is inside itself."""
    tags: dict[int, _Known] = {}
    for each in descriptor.fields:
        most = limits[each.full_name] if each.is_repeated else None
        name = f"{path}{each.name}"
        if each.message_type is not None:
            inner = _tags(each.message_type, limits, f"{name}.")
            tags[each.number << 3 | _LENGTH] = _Known(each.full_name, name, most, inner)
        elif each.is_repeated:
            tags[each.number << 3 | _wire_type(each)] = _Known(each.full_name, name, most)
            if each.type != FieldDescriptor.TYPE_STRING:
                packed = _Known(each.full_name, name, most, packed_bytes=_FIXED_TYPES.get(each.type, 0))
                tags[each.number << 3 | _LENGTH] = packed
    return tags


def _wire_type(known: FieldDescriptor) -> int:
    """Return how a field is written that stands alone."""
    if known.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _LENGTH
    return {8: 1, 4: 5}.get(_FIXED_TYPES.get(known.type, 0), 0)


class _Walk:
    """One way through the bytes of a message."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0
        self._counts: dict[str, int] = {}

    def through(self, root: dict[int, _Known]) -> Iterator[None]:
        """See WireCounts.walk. What ends too early raises IndexError, too."""
        end, tags, fields = len(self._raw), root, 0
        outside: list[tuple[int, dict[int, _Known]]] = []
        while True:
            while self._at >= end:
                if not outside:
                    return
                end, tags = outside.pop()
            fields += 1
            if not fields % FIELDS_AT_A_TIME:
                _check("request", " fields", fields, MAX_FIELDS)
                yield
            tag = self._number()
            size = self._size(tag & 7)
            known = tags.get(tag)
            if self._at + size > end:
                raise NoMessage
            if known is not None:
                self._count(known, size)
                if known.inner is not None:
                    outside.append((end, tags))
                    end, tags = self._at + size, known.inner
                    continue
            self._at += size

    def _size(self, wire_type: int) -> int:
        """Return how many bytes of content are still to come, behind what says so."""
        if wire_type == _LENGTH:
            return self._number()
        if wire_type == 0:
            self._number()
            return 0
        if wire_type in _FIXED_BYTES:
            return _FIXED_BYTES[wire_type]
        raise NoMessage

    def _number(self) -> int:
        raw, at = self._raw, self._at
        byte = raw[at]
        value, shift = byte & 127, 0
        while byte > 127:
            at, shift = at + 1, shift + 7
            if shift > 63:
                raise NoMessage
            byte = raw[at]
            value |= (byte & 127) << shift
        self._at = at + 1
        return value

    def _count(self, known: _Known, size: int) -> None:
        if known.most is None:
            return
        count = self._counts.get(known.full_name, 0)
        if known.packed_bytes is None:
            count += 1
        elif known.packed_bytes:
            count += size // known.packed_bytes
        else:
            end = self._at + size
            for start in range(self._at, end, _COUNTED_BYTES):
                piece = self._raw[start : min(start + _COUNTED_BYTES, end)]
                count += len(piece.translate(None, _UNFINISHED))
                if count > known.most:
                    break
        self._counts[known.full_name] = count
        _check(known.path, "", count, known.most)


def _check(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(name, f"must be at most {most}{what}, is at least {count}")
