"""Something for a stream's reader, and for what stands between, while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvhive.router.http_exchange import WatchedSend, write

BEAT_S = 10.0
"""A stream that is silent for so long, at most twice, gets a beat: proxies give up after 30 s or more."""


@contextlib.asynccontextmanager
async def beating(send: WatchedSend, beat: bytes) -> AsyncIterator[None]:
    """Where the body of a response that has begun is silent, send `beat`."""
    heart = _Heart(send, beat)
    try:
        yield
    finally:
        await heart.stop()


class _Heart:
    """Beside a stream: no timer for each token, and no task before there is a beat."""

    def __init__(self, send: WatchedSend, beat: bytes) -> None:
        self._send = send
        self._beat = beat
        self._seen = send.sent
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(BEAT_S, self._look)
        self._beating: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Beat no more."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def _look(self) -> None:
        if self._send.sent == self._seen and not self._send.sending:  # who takes nothing needs no more of it
            self._seen += 1
            self._beating = self._loop.create_task(write(self._send, self._beat))
        else:
            self._seen = self._send.sent
        self._timer = self._loop.call_later(BEAT_S, self._look)
