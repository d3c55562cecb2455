"""What a call that failed says, as an error of ours.

KvhiveError             proto/errors.py has the tree; of a server's errors these two are seen here alone
├── NotFound            nobody knows what was asked for
└── NotAllowed          the API key is missing, unknown or not good for this
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from kvhive.proto.errors import (
    ComputeError,
    InvalidRequest,
    KvhiveError,
    NotNow,
    Overloaded,
    TimedOut,
    Unavailable,
)

DETAILS_KEY = "grpc-status-details-bin"
_LATER: dict[grpc.StatusCode, type[NotNow]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
}


class NotFound(KvhiveError):
    """Nobody knows what was asked for."""


class NotAllowed(KvhiveError):
    """The API key is missing, unknown or not good for this."""


def failure(error: Any, target: str) -> KvhiveError:
    """Return what an error of gRPC's, of either kind of client, says of the server at `target`."""
    code: grpc.StatusCode = error.code()
    message = error.details() or ""
    found = _Details(error)
    violation = next(iter(found.violations.field_violations), None)
    if violation is not None:
        return InvalidRequest(violation.field, violation.description)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, rest = message.partition(": ")
        return InvalidRequest(field, rest) if rest else InvalidRequest("request", message)
    if code in _LATER:
        if code is grpc.StatusCode.UNAVAILABLE:
            message = f"the router at {target} is not available: {message}"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
            return InvalidRequest("request", message)  # by gRPC itself; it stays so however often it is sent
        return _LATER[code](message, cause=found.cause, retry_after_s=found.retry_after_s)
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFound(message)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return NotAllowed(message)
    if code is grpc.StatusCode.INTERNAL and found.cause == "compute":
        return ComputeError(message)
    return KvhiveError(f"{code.name.lower()}: {message}")


class _Details:
    """The google.rpc details of an error; a server, or a proxy before it, may have sent none."""

    def __init__(self, error: Any) -> None:
        self.violations = error_details_pb2.BadRequest()
        self.cause = ""
        self.retry_after_s: float | None = None
        for key, value in error.trailing_metadata() or ():
            if key == DETAILS_KEY:
                self._read(value)

    def _read(self, raw: bytes) -> None:
        try:
            status = status_pb2.Status.FromString(raw)
            info, wait = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            for detail in status.details:
                known: tuple[Message, ...] = (self.violations, info, wait)
                for message in known:
                    detail.Unpack(message)  # which does nothing where it is another one
        except DecodeError:
            return
        self.cause = info.reason.lower()
        if wait.HasField("retry_delay"):
            self.retry_after_s = wait.retry_delay.ToNanoseconds() / 1e9
