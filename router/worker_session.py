"""The router's end of one kvhive.v1.Worker.Session: all requests to one worker, on one stream.

What is said to the worker while a message is on its way goes out together in the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from kvhive.proto.errors import KvhiveError
from kvhive.proto.v1 import worker_pb2

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
        translated: Callable[[str, str], KvhiveError],
        broken: Callable[[str], KvhiveError],
    ) -> None:
        """Begin on a call of grpc.aio.

        `translated` makes an error of the status, by name, and the details that one request ended with,
        `broken` one of what ended the whole session.
        """
        self._call = call
        self._translated = translated
        self._broken = broken
        self._inboxes: dict[str, _Inbox] = {}
        self._unsent = worker_pb2.SessionRequest()
        self._wake = asyncio.Event()
        self.lost: KvhiveError | None = None
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

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
        self._wake.set()
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
                self._wake.set()

    async def close(self) -> None:
        """End the stream, and with it all that is still open."""
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        lost = "UNAVAILABLE", "the worker ended the session"
        try:
            async for message in self._call:
                for news in message.news:
                    self._deliver(news)
        except grpc.aio.AioRpcError as error:
            lost = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            lost = "CANCELLED", "the session was dropped"
        finally:  # whatever it was: nobody waits for news that cannot come
            self.lost = self._broken(f"{lost[0]}: {lost[1]}")
            self._wake.set()
            for inbox in self._inboxes.values():
                inbox.lost = self.lost
                inbox.wake()

    def _deliver(self, news: worker_pb2.SessionNews) -> None:
        inbox = self._inboxes.get(news.request_id)
        if inbox is None:
            return  # its reader has gone, and the worker is hearing of it
        inbox.news.append(news)
        inbox.wake()
        if len(inbox.news) > MAX_UNREAD and not inbox.held:
            inbox.held = True
            self._unsent.hold.append(news.request_id)
            self._wake.set()

    def _go_on(self, request_id: str, inbox: _Inbox) -> None:
        inbox.held = False
        self._unsent.resume.append(request_id)
        self._wake.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self.lost is not None:
                    return
                message, self._unsent = self._unsent, worker_pb2.SessionRequest()
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._call.cancel()  # `_read` says why it is over
