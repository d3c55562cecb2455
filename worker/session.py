"""All of a router's requests to this worker on one connection: the news of a step travel in one message.

A message costs sender and receiver some hundred microseconds, whatever is in it. A request that is held,
because its reader is slow, keeps what becomes ready, as it would on a stream of its own that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from kvhive.proto.errors import KvhiveError, TimedOut
from kvhive.proto.frames import FrameConnection
from kvhive.proto.transport import MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.refusal import status_of
from kvhive.worker.request_stream import MAX_POSITIONS_PER_MESSAGE, RequestStream

log = logging.getLogger(__name__)


class RequestDesk(Protocol):
    """Where requests are handed in."""

    def open(
        self, request: worker_pb2.WorkerGenerateRequest, heard: Callable[[], None] | None = None
    ) -> RequestStream:
        """Begin a request; `heard` is called on the loop when there is news of it. Raises KvhiveError."""
        ...

    def close(self, request_id: str) -> None:
        """End a request that was opened, whatever it was doing. Once."""
        ...


class Session:
    """One router's requests. Lives on the service's event loop; holds what its requests' streams hold."""

    def __init__(self, desk: RequestDesk) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._held: set[str] = set()
        self._ready: dict[str, None] = {}  # in the order of their news
        self._ends: list[worker_pb2.SessionNews] = []
        self._connection: FrameConnection | None = None
        self._ending = asyncio.Event()
        self._writing = False
        self._over = False

    def connect(self, connection: FrameConnection) -> None:
        """Do what the router says there, and say there what becomes ready."""
        if self._over:
            connection.close("the session has ended")
            return
        self._connection = connection
        connection.receive, connection.ended, connection.writable = self._receive, self._ended, self._soon
        connection.limit = MAX_MESSAGE_BYTES

    async def wait(self) -> None:
        """Wait until it is over."""
        await self._ending.wait()

    def end(self) -> None:
        """Say no more than what was heard already: the worker is stopping."""
        if self._over:
            return
        self._over = True
        if self._connection is not None:
            while self._ready or self._ends:
                self._connection.send(self._gather().SerializeToString())
            self._connection.close()
        self._ending.set()

    def abandon(self) -> None:
        """The router has gone: end all that it asked for. Again does no harm."""
        for request_id in list(self._streams):
            self._close(request_id)
        self._ends.clear()
        self.end()

    def _ended(self, why: str) -> None:
        log.info("a session ended: %s", why)
        self.abandon()

    def _receive(self, frame: bytes) -> None:
        try:
            message = worker_pb2.SessionRequest.FromString(frame)
        except DecodeError:
            assert self._connection is not None
            self._connection.close("a frame that is no SessionRequest")
            return
        for request in message.start:
            self._start(request)
        for request_id in message.cancel:
            if request_id in self._streams:
                self._close(request_id)
        for request_id in message.hold:
            self._hold(request_id)
        for request_id in message.resume:
            self._resume(request_id)

    def _soon(self) -> None:
        """Write when this turn of the loop, which may bring more news, is over."""
        if not self._writing and not self._over and (self._ready or self._ends):
            self._writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._writing = False
        if self._over or self._connection is None or self._connection.paused:
            return
        response = self._gather()
        if response.news:
            self._connection.send(response.SerializeToString())
        self._soon()

    def _start(self, request: worker_pb2.WorkerGenerateRequest) -> None:
        request_id = request.request_id
        if self._over:
            return
        try:
            self._streams[request_id] = self._desk.open(request, lambda: self._heard(request_id))
        except KvhiveError as error:
            self._tell_end(request_id, status_of(error), str(error))
            return
        except Exception:  # a fault of ours, which must not end the others' streams
            log.exception("request=%s could not begin", request_id)
            self._tell_end(request_id, "INTERNAL", "the worker failed to take the request in")
            return
        if request.queue_timeout_s:
            self._deadlines[request_id] = self._loop.call_later(
                request.queue_timeout_s, self._too_late, request_id, request.queue_timeout_s
            )

    def _heard(self, request_id: str) -> None:
        if request_id not in self._held:
            self._ready[request_id] = None
            self._soon()

    def _hold(self, request_id: str) -> None:
        if request_id in self._streams:
            self._held.add(request_id)
            self._ready.pop(request_id, None)

    def _resume(self, request_id: str) -> None:
        self._held.discard(request_id)
        if request_id in self._streams and self._streams[request_id].ready:
            self._heard(request_id)

    def _gather(self) -> worker_pb2.SessionResponse:
        """Return all that is ready, or so much of it as a message may have."""
        response = worker_pb2.SessionResponse()
        room = MAX_POSITIONS_PER_MESSAGE
        while self._ready and room > 0:
            request_id = next(iter(self._ready))
            del self._ready[request_id]
            room -= self._take(request_id, response.news.add(request_id=request_id), room)
        response.news.extend(self._ends)
        self._ends.clear()
        return response

    def _take(self, request_id: str, news: worker_pb2.SessionNews, room: int) -> int:
        """Put what is ready of one request into its news; return how many positions it took."""
        stream, taken = self._streams[request_id], 0
        try:
            taken = stream.take_into(news.response, room)
        except KvhiveError as error:
            news.end.status, news.end.details = status_of(error), str(error)
        else:
            if stream.ended:
                news.end.status = "OK"
        if news.HasField("end"):
            self._close(request_id)
        elif stream.begun and request_id in self._deadlines:
            self._deadlines.pop(request_id).cancel()
        if request_id in self._streams and stream.ready:
            self._heard(request_id)
        return taken

    def _too_late(self, request_id: str, limit_s: float) -> None:
        self._close(request_id)
        error = TimedOut(f"queue_timeout_s: no first token within {limit_s:g} s")
        self._tell_end(request_id, status_of(error), str(error))

    def _tell_end(self, request_id: str, status: str, details: str) -> None:
        end = worker_pb2.SessionEnd(status=status, details=details)
        self._ends.append(worker_pb2.SessionNews(request_id=request_id, end=end))
        self._soon()

    def _close(self, request_id: str) -> None:
        del self._streams[request_id]
        self._ready.pop(request_id, None)
        self._held.discard(request_id)
        if request_id in self._deadlines:
            self._deadlines.pop(request_id).cancel()
        self._desk.close(request_id)
