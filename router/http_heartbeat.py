"""Something for a stream's reader, and for what stands between, while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Send

from kvhive.router.http_exchange import write

BEAT_S = 10.0
"""A stream that is silent for so long, at most twice, gets a beat: proxies give up after 30 s or more."""


@contextlib.asynccontextmanager
async def beating(send: Send, beat: bytes) -> AsyncIterator[Send]:
    """Yield a `send` for the body of a response that has begun: where it is silent, `beat` is sent."""
    heart = _Heart(send, beat)
    try:
        yield heart
    finally:
        await heart.stop()


class _Heart:
    """Between a stream and its `send`: no timer for each token, and no task before there is a beat."""

    def __init__(self, send: Send, beat: bytes) -> None:
        self._send = send
        self._beat = beat
        self._sending = False
        self._sent = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(BEAT_S, self._look)
        self._beating: asyncio.Task[None] | None = None

    async def __call__(self, message: Any) -> None:
        self._sending = self._sent = True
        await self._send(message)
        self._sending = False

    async def stop(self) -> None:
        """Beat no more."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def _look(self) -> None:
        # Who takes nothing needs no more of it.
        if not (self._sent or self._sending or (self._beating is not None and not self._beating.done())):
            self._beating = self._loop.create_task(write(self._send, self._beat))
        self._sent = False
        self._timer = self._loop.call_later(BEAT_S, self._look)
