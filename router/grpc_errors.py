"""Errors as gRPC tells them: a status, words for people, and google.rpc details for programs.

The details travel as google.rpc.Status in the trailing metadata `grpc-status-details-bin`: BadRequest names
the field, ErrorInfo says why in a word, RetryInfo says when to come again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvhive.proto.errors import (
    ComputeError,
    InvalidRequest,
    KvhiveError,
    NotNow,
    Overloaded,
    TimedOut,
)

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata: in how many milliseconds a refused request should be tried again."""
DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvhive"
"""Of ErrorInfo's reasons."""
MAX_DETAIL_BYTES = 1024
"""Of a message: gRPC's clients refuse trailing metadata of more than 8 KiB, and with it the status. A message
is in there up to three times: percent-encoded, which may make three bytes of each, and twice in Base64."""
MAX_FIELD_BYTES = 256

Metadata = tuple[tuple[str, str | bytes], ...]


async def abort(context: Any, error: KvhiveError) -> None:
    """End a call with the error's status, and say when it may be tried again, where somebody knows."""
    await end(context, status_code(error), str(error), _details(error), _retry_after_s(error))


async def end(
    context: Any,
    code: grpc.StatusCode,
    message: str,
    details: Iterator[Message] | tuple[Message, ...] = (),
    retry_after_s: float | None = None,
) -> None:
    """End a call with a status and its details."""
    message = shortened(message)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    metadata: Metadata = ((DETAILS_KEY, status.SerializeToString()),)
    if retry_after_s is not None:
        metadata += ((RETRY_AFTER_KEY, str(math.ceil(retry_after_s * 1000))),)
    await context.abort(code, message, metadata)


def status_code(error: KvhiveError) -> grpc.StatusCode:
    """Return the status that says it."""
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, TimedOut):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, ComputeError):
        return grpc.StatusCode.INTERNAL
    return grpc.StatusCode.UNAVAILABLE


def error_info(reason: str) -> error_details_pb2.ErrorInfo:
    """Return why, in a word; a reason is spelled in capitals by its own rules."""
    return error_details_pb2.ErrorInfo(reason=reason.upper(), domain=DOMAIN)


def shortened(message: str, most: int = MAX_DETAIL_BYTES) -> str:
    """Return a text that fits where errors travel: at most so many bytes of UTF-8."""
    raw = message.encode(errors="replace")
    return message if len(raw) <= most else f"{raw[: most - 3].decode(errors='ignore')}..."


def _details(error: KvhiveError) -> Iterator[Message]:
    if isinstance(error, InvalidRequest):
        description = shortened(error.problem)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=shortened(error.field, MAX_FIELD_BYTES), description=description
        )
        yield error_info("invalid_request")
        yield error_details_pb2.BadRequest(field_violations=[violation])
    elif isinstance(error, NotNow):
        yield error_info(error.cause or "other")
    elif isinstance(error, ComputeError):
        yield error_info("compute")
    seconds = _retry_after_s(error)
    if seconds is not None:
        wait = error_details_pb2.RetryInfo()
        wait.retry_delay.FromNanoseconds(math.ceil(seconds * 1e9))
        yield wait


def _retry_after_s(error: KvhiveError) -> float | None:
    return error.retry_after_s if isinstance(error, NotNow) else None
