"""Time in which this process ran: what passes while the machine has none of it for us is nobody's fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.2
MOST_S = 0.5
"""A tick that took longer was one in which we stood still."""


class AwakeTime:
    """For one event loop, on which `run` runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = 0.0
        """In which this process ran."""
        self.lost_s = 0.0
        """In which it did not."""

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(TICK_S)
            self.passed(self._clock() - before)

    def passed(self, seconds: float) -> None:
        """One tick took so long."""
        self.seconds += min(seconds, MOST_S)
        self.lost_s += max(0.0, seconds - MOST_S)

    def __call__(self) -> float:
        """Be a clock."""
        return self.seconds
