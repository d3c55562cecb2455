"""The life of one generation as one HTTP response, in any dialect: from its first event to its last byte.

One coroutine owns the generators, so every way out (end, error, disconnect, shutdown) closes them at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvhive.proto.errors import KvhiveError, Unavailable

SEND_TIMEOUT_S = 60.0
"""A client that takes nothing for this long, and at most a quarter more, is gone: its stream must not hold a
worker for ever."""
WATCH_AFTER_S = 0.05
"""From when on a response is watched for a client that goes: most short ones are over by then."""
FAREWELL_S = 1.0
"""Longest the last words of a cancelled response may take."""


class HttpExchange(Response, ABC):
    """The ASGI application that answers one request; a dialect says how."""

    def __init__(self, gave_up: Callable[[], None]) -> None:
        """Prepare; `gave_up` is called when its reader takes nothing for too long."""
        self._gave_up = gave_up
        self._streaming = False
        self.begun = False
        """Whether anything of the response was sent."""
        self.background = None

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, send: WatchedSend) -> None:
        """Generate and send the whole response. Cancelled when the client is gone."""

    @abstractmethod
    def refusal(self, error: KvhiveError) -> Response:
        """Return an error as a whole response."""

    @abstractmethod
    def last_event(self, error: KvhiveError) -> bytes:
        """Return an error as the last event of a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the end or until the client is gone, whichever comes first."""
        answering = asyncio.current_task()
        assert answering is not None
        watched = WatchedSend(send, answering.cancel)
        client = _WatchedClient(receive, watched, answering.cancel)
        try:
            await self.answer(scope, receive, watched)
        except asyncio.CancelledError:
            if not (client.gone or watched.stalled):
                # The server does so, after the grace of its shutdown; it expects no more of this task.
                await self._farewell(scope, receive, send)
            elif watched.stalled:
                self._gave_up()
        finally:
            self.begun = watched.sent > 0
            watched.close()
            client.close()

    async def open_stream(self, send: Send, headers: Mapping[str, str]) -> None:
        """Send the head of a stream of events."""
        fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _farewell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client that the server is stopping, as well as its response still allows."""
        error = Unavailable("the server is shutting down")
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self._streaming:
                    await write(send, self.last_event(error), more=False)
                else:
                    await self.refusal(error)(scope, receive, send)
        except (TimeoutError, RuntimeError):
            return  # the client takes nothing any more, or its response was already complete


async def write(send: Send, data: bytes, more: bool = True) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


class WatchedSend:
    """A `send` that says when the client has been taking nothing for too long: no timer for each token."""

    def __init__(self, send: Send, give_up: Callable[[], object]) -> None:
        self._send = send
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(SEND_TIMEOUT_S / 4, self._look)
        self._last: Any = {}
        self.sent = 0
        """Messages, with the one that is being sent."""

    async def __call__(self, message: Any) -> None:
        """Send a message; see ASGI."""
        self._last = message
        self.sent += 1
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    @property
    def ended(self) -> bool:
        """Whether the response's last message was sent, or is being sent."""
        return self._last.get("type") == "http.response.body" and not self._last.get("more_body", False)

    @property
    def sending(self) -> bool:
        """Whether something is being sent now."""
        return self._since is not None

    @property
    def stalled(self) -> bool:
        """Whether what is being sent now has taken SEND_TIMEOUT_S."""
        return self._since is not None and self._loop.time() - self._since >= SEND_TIMEOUT_S

    def _look(self) -> None:
        if self.stalled:
            self._give_up()
        else:
            self._timer = self._loop.call_later(SEND_TIMEOUT_S / 4, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()


class _WatchedClient:
    """Says when the client has gone before it had its whole response."""

    def __init__(self, receive: Receive, send: WatchedSend, give_up: Callable[[], object]) -> None:
        self._receive = receive
        self._send = send
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(WATCH_AFTER_S, self._watch)
        self._watching: asyncio.Task[None] | None = None
        self.gone = False

    def close(self) -> None:
        """Watch no more."""
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def _watch(self) -> None:
        self._watching = self._loop.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._send.ended:
            return  # the server says so of a whole response, too, while what made it may still be closing
        self.gone = True
        self._give_up()
