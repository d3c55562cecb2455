"""The router's side of kvhive.v1.Worker: streams from a worker and says in our words how it failed."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError, TimedOut
from kvhive.proto.transport import CLUSTER_TOKEN_KEY, MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.router.worker_session import WorkerSession

log = logging.getLogger(__name__)

# With these a killed worker is known in milliseconds and a hung one in about a second, long before its lease.
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # workers are inside the cluster, whatever http_proxy says
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # as long may connecting take, too
    ("grpc.max_reconnect_backoff_ms", 2000),  # by default minutes, in which a worker that is back is refused
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # no window of megabytes for tokens that nobody takes
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


STOP_TIMEOUT_S = 1.0
"""Longest that a stream waits for its worker to hear that a choice is to stop: that is a courtesy."""


class WorkerLost(KvhiveError):
    """The worker is gone, hung, draining or broken: the request should go on elsewhere."""

    def __init__(self, message: str, cause: str = "connection") -> None:
        """`cause` is one word: `connection` (it is gone or hung), `stopping` (or draining, or its engine
        failed), `refused` (it is not who it was), `early_end`."""
        super().__init__(message)
        self.cause = cause


class WorkerBusy(KvhiveError):
    """The worker's queue is full: another one may have room."""


class WorkerClient(Protocol):
    """How the dispatcher reaches workers."""

    def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """Stream one request. Closing the generator cancels it.

        Raises WorkerLost or WorkerBusy, or InvalidRequest, TimedOut and ComputeError, which would be the
        same elsewhere.
        """
        ...

    async def stop_choices(self, address: str, request_id: str, choices: Sequence[int]) -> None:
        """Tell a worker that some choices of a running request are not wanted any more.

        Advice: a worker that does not hear it goes on in vain. Raises nothing.
        """
        ...


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    stub: Any
    session: WorkerSession | None = None


class GrpcWorkerClient:
    """One session per worker address, opened on first use and closed when nobody lives there any more."""

    def __init__(self, cluster_token: str) -> None:
        self._metadata = ((CLUSTER_TOKEN_KEY, cluster_token),)
        self._connections: dict[str, _Connection] = {}

    def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """See WorkerClient."""
        connection = self._connection(address)
        session = connection.session
        if session is None or session.lost is not None:
            call = connection.stub.Session(worker_pb2.OpenSessionRequest(), metadata=self._metadata)
            session = connection.session = WorkerSession(
                call,
                address.rpartition(":")[0].strip("[]"),
                partial(_translated, address),
                lambda text: WorkerLost(f"worker at {address}: {text}"),
            )
        return session.generate(request)

    async def stop_choices(self, address: str, request_id: str, choices: Sequence[int]) -> None:
        """See WorkerClient."""
        request = worker_pb2.StopChoicesRequest(request_id=request_id, choices=choices)
        try:
            await self._connection(address).stub.StopChoices(
                request, metadata=self._metadata, timeout=STOP_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:  # its stream will say what is wrong with it
            log.debug("not stopped request_id=%s choices=%s: %s", request_id, choices, error.code().name)

    def open_requests(self) -> int:
        """Requests that have not ended, at all workers."""
        sessions = (connection.session for connection in self._connections.values())
        return sum(session.requests for session in sessions if session is not None)

    async def retain(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses, but for those with a stream that still goes on."""
        for address, connection in list(self._connections.items()):
            if address not in addresses and not (connection.session and connection.session.requests):
                await self._close(address)

    async def close(self) -> None:
        """Close everything."""
        for address in list(self._connections):
            await self._close(address)

    async def _close(self, address: str) -> None:
        connection = self._connections.pop(address)
        if connection.session is not None:
            await connection.session.close()
        await connection.channel.close()

    def _connection(self, address: str) -> _Connection:
        if address not in self._connections:
            channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            self._connections[address] = _Connection(channel, worker_pb2_grpc.WorkerStub(channel))
        return self._connections[address]


def _translated(address: str, status: str, details: str) -> KvhiveError:
    match status:
        case "INVALID_ARGUMENT":
            field, _, message = details.partition(": ")
            return InvalidRequest(field, message)
        case "RESOURCE_EXHAUSTED":
            return WorkerBusy(details)
        case "INTERNAL":
            return ComputeError(details)
        case "DEADLINE_EXCEEDED":
            return TimedOut(details)
    cause = "stopping" if status == "UNAVAILABLE" else "refused"
    return WorkerLost(f"worker at {address}: {status}: {details}", cause)
