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
    """Between a stream and its `send`: no timer for each token."""

    def __init__(self, send: Send, beat: bytes) -> None:
        self._send = send
        self._beat = beat
        self._sending = False
        self._sent = False
        self._task = asyncio.create_task(self._run())

    async def __call__(self, message: Any) -> None:
        self._sending = self._sent = True
        await self._send(message)
        self._sending = False

    async def stop(self) -> None:
        """Beat no more."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not (self._sent or self._sending):  # who takes nothing needs no more of it
                await write(self._send, self._beat)
            self._sent = False
