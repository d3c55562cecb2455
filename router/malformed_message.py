"""Answers a message that is not what the .proto says with INVALID_ARGUMENT, naming the field where it can.

gRPC itself would answer UNKNOWN before any handler is asked. So parsing never fails here: what cannot be
parsed becomes a Malformed, and the handler's stand-in refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvhive.proto.errors import InvalidRequest
from kvhive.router.grpc_errors import abort

EXPLAINED_BYTES = 16 * 1024
"""Larger messages are refused without naming the field: looking for it would hold up the event loop."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that could not be parsed, and why."""

    reason: str

    @property
    def error(self) -> InvalidRequest:
        """It as every door says it."""
        field, _, message = self.reason.partition(": ")
        return InvalidRequest(field, message)


class MalformedMessageGuard(grpc.aio.ServerInterceptor):
    """Wraps the handlers of the given request types, by full method name."""

    def __init__(self, requests: dict[str, type[Message]]) -> None:
        self._requests = requests

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace a known method's handler by one that survives any bytes."""
        handler = await continuation(handler_call_details)
        request = self._requests.get(handler_call_details.method)
        if handler is None or request is None:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(handler.unary_stream), _parser(request), handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _single(handler.unary_unary), _parser(request), handler.response_serializer
        )


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


def _parser(request: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(raw: bytes) -> Message | Malformed:
        try:
            return request.FromString(raw)
        except DecodeError:
            return Malformed(explain(raw, request))

    return parse


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


def _streaming(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, Malformed):
            await abort(context, request.error)
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return guarded


def _single(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await abort(context, request.error)
        return await behaviour(request, context)

    return guarded
