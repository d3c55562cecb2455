"""How a worker says no: the gRPC status of each error, by name."""

from __future__ import annotations

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError, Overloaded, TimedOut


class Refused(KvhiveError):
    """This worker takes no such request, now or ever."""

    def __init__(self, status: str, details: str) -> None:
        """Name the gRPC status and say why."""
        super().__init__(details)
        self.status = status


_STATUS: dict[type[KvhiveError], str] = {
    InvalidRequest: "INVALID_ARGUMENT",
    Overloaded: "RESOURCE_EXHAUSTED",
    ComputeError: "INTERNAL",
    TimedOut: "DEADLINE_EXCEEDED",
}


def status_of(error: KvhiveError) -> str:
    """Return the name of the status that a request which ends with `error` ends with."""
    return error.status if isinstance(error, Refused) else _STATUS.get(type(error), "UNAVAILABLE")
