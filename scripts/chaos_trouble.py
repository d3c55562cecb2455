"""Who is being struck at the moment, and how often who was: what faults write and the load reads."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator

log = logging.getLogger(__name__)


class Trouble:
    """For one event loop. Names are those of workers (w1), routers (r1), and `redis`."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        """Faults so far, by kind."""
        self.struck: set[str] = set()
        self._marks: Counter[str] = Counter()
        self.blackouts = 0
        """Moments so far in which no worker was left: it counts at their beginning and at their end."""
        self._last_dark = -math.inf

    @property
    def dark(self) -> bool:
        """Whether no worker is left now."""
        return self.blackouts % 2 == 1

    def mark(self, name: str) -> int:
        """Return a number that grows when somebody is struck and when that is over."""
        return self._marks[name]

    def quiet_since(self, name: str, mark: int) -> bool:
        """Whether nothing was wrong with somebody since `mark` was taken."""
        return name not in self.struck and self._marks[name] == mark

    @contextlib.contextmanager
    def striking(self, fault: str, *names: str) -> Iterator[None]:
        """Count a fault, and hold its victims as struck until all is well with them again."""
        self.faults[fault] += 1
        log.info("fault=%s begins victims=%s", fault, ",".join(names))
        self.struck |= set(names)
        self._marks.update(names)
        try:
            yield
        finally:
            self._marks.update(names)
            self.struck -= set(names)
            log.info("fault=%s is over victims=%s", fault, ",".join(names))

    @contextlib.contextmanager
    def darkness(self) -> Iterator[None]:
        """No worker is left."""
        self.blackouts += 1
        try:
            yield
        finally:
            self.blackouts += 1
            self._last_dark = time.monotonic()

    def dark_within(self, seconds: float) -> bool:
        """Whether no worker was left at a moment that is not longer ago."""
        return self.dark or time.monotonic() - self._last_dark <= seconds
