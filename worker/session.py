"""All of a router's requests to this worker on one stream: the news of a step travel in one message.

A message costs sender and receiver some hundred microseconds, whatever is in it. A request that is held,
because its reader is slow, keeps what becomes ready, as it would on a stream of its own that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from kvhive.proto.errors import KvhiveError, TimedOut
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
        self._wake = asyncio.Event()
        self._over = False

    async def run(
        self, messages: AsyncIterator[worker_pb2.SessionRequest]
    ) -> AsyncGenerator[worker_pb2.SessionResponse, None]:
        """Do what the router says and yield what becomes ready, until it says no more. Ends what is open."""
        reading = asyncio.create_task(self._read(messages))
        try:
            while not self._over:
                await self._wake.wait()
                self._wake.clear()
                response = self._gather()
                if response.news:
                    yield response
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.abandon()

    def end(self) -> None:
        """Say no more: the worker is stopping."""
        self._over = True
        self._wake.set()

    def abandon(self) -> None:
        """The router has gone: end all that it asked for. Again does no harm."""
        self.end()
        for request_id in list(self._streams):
            self._close(request_id)

    async def _read(self, messages: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            async for message in messages:
                for request in message.start:
                    self._start(request)
                for request_id in message.cancel:
                    if request_id in self._streams:
                        self._close(request_id)
                for request_id in message.hold:
                    self._hold(request_id)
                for request_id in message.resume:
                    self._resume(request_id)
        finally:
            self.end()

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
            self._wake.set()

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
        if self._ready:
            self._wake.set()
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
        self._wake.set()

    def _close(self, request_id: str) -> None:
        del self._streams[request_id]
        self._ready.pop(request_id, None)
        self._held.discard(request_id)
        if request_id in self._deadlines:
            self._deadlines.pop(request_id).cancel()
        self._desk.close(request_id)
