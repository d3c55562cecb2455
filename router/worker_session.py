"""The router's end of one kvhive.v1.Worker.Session: all requests to one worker, on one connection.

A call of gRPC says who may connect, and notices at once when the worker is gone or hung; messages go over a
socket, which costs half as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvhive.proto.errors import KvhiveError
from kvhive.proto.frames import FrameConnection
from kvhive.proto.v1 import worker_pb2

CONNECT_TIMEOUT_S = 2.0
"""Longest that connecting to a worker may take."""

LAST_NEWS_S = 1.0
"""Longest that is waited for a worker's last news, when its call has ended."""

MAX_UNREAD = 64
"""News of one request beyond which its worker is told to hold it: its reader is slow, others' are not."""


class _Inbox:
    """What has come for one request and its reader has not taken."""

    def __init__(self) -> None:
        self.news: deque[worker_pb2.SessionNews] = deque()
        self.lost: KvhiveError | None = None
        self.held = False
        self._waiting: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Wait until there is something to read. For one reader."""
        while not self.news and self.lost is None:
            self._waiting = self._loop.create_future()
            await self._waiting


class WorkerSession:
    """Open until its stream ends, however that comes about; `lost` then says so. Lives on one event loop."""

    def __init__(
        self,
        call: Any,
        host: str,
        translated: Callable[[str, str], KvhiveError],
        broken: Callable[[str], KvhiveError],
    ) -> None:
        """Begin on a call of grpc.aio to a worker on `host`.

        `translated` makes an error of the status, by name, and the details that one request ended with,
        `broken` one of what ended the whole session.
        """
        self._call = call
        self._translated = translated
        self._broken = broken
        self._inboxes: dict[str, _Inbox] = {}
        self._unsent = worker_pb2.SessionRequest()
        self._loop = asyncio.get_running_loop()
        self._connection = FrameConnection(self._receive, self._hung_up, self._soon)
        self._connection_ended: asyncio.Future[None] = self._loop.create_future()
        self._connected = self._writing = False
        self.lost: KvhiveError | None = None
        self._task = asyncio.create_task(self._live(host))

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._inboxes)

    async def generate(
        self, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """See WorkerClient."""
        request_id = request.request_id
        if self.lost is not None:
            raise self.lost.with_traceback(None)  # others raise it, too
        inbox = self._inboxes[request_id] = _Inbox()
        self._unsent.start.append(request)
        self._soon()
        ended = False
        try:
            while True:
                if not inbox.news:
                    if inbox.held:
                        self._go_on(request_id, inbox)
                    await inbox.wait()
                    if not inbox.news:
                        assert inbox.lost is not None
                        raise inbox.lost.with_traceback(None)
                news = inbox.news.popleft()
                ended = news.HasField("end")
                if news.HasField("response"):
                    yield news.response
                if ended:
                    if news.end.status != "OK":
                        raise self._translated(news.end.status, news.end.details)
                    return
        finally:
            del self._inboxes[request_id]
            if not ended and self.lost is None:
                self._unsent.cancel.append(request_id)
                self._soon()

    async def close(self) -> None:
        """End the call, and with it all that is still open."""
        self._call.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self, host: str) -> None:
        lost, in_order = "UNAVAILABLE: the worker ended the session", False
        try:
            offer = await self._call.read()
            if offer is not grpc.aio.EOF:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._loop.create_connection(lambda: self._connection, host, offer.port)
                self._connection.send(offer.ticket)
                self._connected = True
                self._soon()
                await self._call.read()
            in_order = (code := await self._call.code()) is grpc.StatusCode.OK
            if not in_order:
                lost = f"{code.name}: {await self._call.details()}"
        except grpc.aio.AioRpcError as error:
            lost = f"{error.code().name}: {error.details() or ''}"
        except OSError as error:
            lost = f"UNAVAILABLE: {error or 'no connection in time'}"
        except asyncio.CancelledError:
            lost = "CANCELLED: the session was dropped"
        finally:  # whatever it was: nobody waits for news that cannot come
            # The last news of a worker that stops may be on their way: it closes the connection after them.
            if in_order and self._connected and not self._connection_ended.done():
                await asyncio.wait([self._connection_ended], timeout=LAST_NEWS_S)
            self._connection.close()
            self._end(lost)

    def _end(self, lost: str) -> None:
        if self.lost is None:
            self.lost = self._broken(lost)
            for inbox in self._inboxes.values():
                inbox.lost = self.lost
                inbox.wake()

    def _hung_up(self, why: str) -> None:
        if not self._connection_ended.done():
            self._connection_ended.set_result(None)
        self._end(f"UNAVAILABLE: {why}")
        self._call.cancel()

    def _receive(self, frame: bytes) -> None:
        try:
            message = worker_pb2.SessionResponse.FromString(frame)
        except DecodeError:
            self._connection.close("a frame that is no SessionResponse")
            return
        for news in message.news:
            self._deliver(news)

    def _deliver(self, news: worker_pb2.SessionNews) -> None:
        inbox = self._inboxes.get(news.request_id)
        if inbox is None:
            return  # its reader has gone, and the worker is hearing of it
        inbox.news.append(news)
        inbox.wake()
        if len(inbox.news) > MAX_UNREAD and not inbox.held:
            inbox.held = True
            self._unsent.hold.append(news.request_id)
            self._soon()

    def _go_on(self, request_id: str, inbox: _Inbox) -> None:
        inbox.held = False
        self._unsent.resume.append(request_id)
        self._soon()

    def _soon(self) -> None:
        """Write when this turn of the loop, in which more may be said, is over."""
        if self._connected and not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._writing = False
        if self.lost is None and not self._connection.paused and self._unsent.ByteSize():
            message, self._unsent = self._unsent, worker_pb2.SessionRequest()
            self._connection.send(message.SerializeToString())
