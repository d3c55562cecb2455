"""The loops that a router cannot do without: the first that fails ends the router, and says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)


class Supervisor:
    """An asynchronous context manager around background loops. Sets `stop` when one of them fails."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.failure: BaseException | None = None
        self._stop = stop
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, loop: Coroutine[Any, Any, None]) -> None:
        """Run a loop until the end of the context."""
        task = asyncio.create_task(loop)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a loop of the router failed, the router stops", exc_info=error)
            self.failure = self.failure or error
            self._stop.set()
