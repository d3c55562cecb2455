"""Refuses bytes that are not what the .proto says or have too much in them, naming the field where it can.

gRPC itself would answer UNKNOWN before any handler is asked, and parse all before anybody can count. So
handlers are given here what their stand-in has looked at and parsed itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvhive.proto.errors import InvalidRequest
from kvhive.router.grpc_errors import abort
from kvhive.router.grpc_wire_counts import NoMessage, WireCounts

EXPLAINED_BYTES = 16 * 1024
"""Larger messages are refused without naming the field: looking for it would hold up the event loop."""
COUNTED_BYTES = 16 * 1024
"""Larger messages are counted before they are parsed: in fewer bytes there is no crowd that matters."""


class MalformedMessageGuard(grpc.aio.ServerInterceptor):
    """Wraps the handlers of the given request types, by full method name, within limits of what repeats."""

    def __init__(self, requests: Mapping[str, type[Message]], limits: Mapping[str, int]) -> None:
        """Prepare; `limits` are those of `wire_limits`."""
        self._readers = {name: _Reader(request, limits) for name, request in requests.items()}
        self._turn = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace a known method's handler by one that survives any bytes."""
        handler = await continuation(handler_call_details)
        reader = self._readers.get(handler_call_details.method)
        if handler is None or reader is None:
            return handler
        # Without a deserializer a handler is given the bytes.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, reader), None, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._single(handler.unary_unary, reader), None, handler.response_serializer
        )

    async def _read(self, raw: bytes, reader: _Reader, context: Any) -> Message:
        """Return the message, or end the call."""
        try:
            if len(raw) > COUNTED_BYTES:
                # One at a time: each lets others go on after a little, all together would not.
                async with self._turn:
                    await reader.count(raw)
            return reader.parse(raw)
        except InvalidRequest as error:
            await abort(context, error)
            raise

    def _streaming(self, behaviour: Any, reader: _Reader) -> Any:
        async def guarded(raw: bytes, context: Any) -> AsyncIterator[Any]:
            request = await self._read(raw, reader, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return guarded

    def _single(self, behaviour: Any, reader: _Reader) -> Any:
        async def guarded(raw: bytes, context: Any) -> Any:
            return await behaviour(await self._read(raw, reader, context), context)

        return guarded


class _Reader:
    """Reads requests of one type."""

    def __init__(self, request: type[Message], limits: Mapping[str, int]) -> None:
        self._request = request
        self._counts = WireCounts(request, limits)

    async def count(self, raw: bytes) -> None:
        """Go through it, a little at a time. Raises InvalidRequest."""
        try:
            for _ in self._counts.walk(raw):
                await asyncio.sleep(0)
        except NoMessage as error:
            raise _as_error(explain(raw, self._request)) from error

    def parse(self, raw: bytes) -> Message:
        """Return it. Raises InvalidRequest."""
        try:
            return self._request.FromString(raw)
        except DecodeError as error:
            raise _as_error(explain(raw, self._request)) from error


def explain(raw: bytes, request: type[Message]) -> str:
    """Say what is wrong with bytes that are no `request`: `field: ...` for text that is not UTF-8."""
    if len(raw) > EXPLAINED_BYTES:
        return f"request: {len(raw)} bytes that are not a valid {request.DESCRIPTOR.full_name}"
    try:
        name, bad = _bad_text(raw, request.DESCRIPTOR, "")
    except DecodeError:
        return f"request: {len(raw)} bytes that are not a {request.DESCRIPTOR.full_name}"
    if name:
        return f"{name}: must be valid UTF-8, is {bad[:32]!r}"
    return f"request: not a valid {request.DESCRIPTOR.full_name}"


def _as_error(reason: str) -> InvalidRequest:
    field, _, problem = reason.partition(": ")
    return InvalidRequest(field, problem)


def _bad_text(raw: bytes, descriptor: Any, path: str) -> tuple[str, bytes]:
    """Return the path and bytes of the first string that is not UTF-8; empty when there is none.

    Empty knows no field, so parsing as it lists every field with its raw value.
    """
    seen: dict[int, int] = {}
    fields: Any = UnknownFieldSet(Empty.FromString(raw))  # a sequence, which its stubs do not say
    for field in fields:
        known = descriptor.fields_by_number.get(field.field_number)
        if known is None or not isinstance(field.data, bytes):
            continue
        index = seen[field.field_number] = seen.get(field.field_number, -1) + 1
        name = f"{path}{known.name}" + (f"[{index}]" if known.is_repeated else "")
        if known.type == FieldDescriptor.TYPE_STRING:
            try:
                field.data.decode()
            except UnicodeDecodeError:
                return name, field.data
        elif known.type == FieldDescriptor.TYPE_MESSAGE and known.message_type is not None:
            inner = _bad_text(field.data, known.message_type, f"{name}.")
            if inner[0]:
                return inner
    return "", b""
