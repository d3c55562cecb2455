"""The bounds of one transfer: until when, how long a chunk may take and, for measurements, how fast it is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


class TransferStopped(Exception):
    """The transfer was given up between two chunks."""


@dataclass(slots=True, eq=False)
class Pace:
    """Seconds are of `time.monotonic`."""

    deadline: float
    stall_s: float
    """Longest that one chunk may take."""
    stopped: threading.Event = field(default_factory=threading.Event)
    bytes_per_s: float = 0.0
    """For measurements: never faster than this; 0 is as fast as it goes."""
    delay_s: float = 0.0
    """For measurements: waited once, before the first chunk."""
    _next_at: float | None = None
    """When a slower network would have brought all that was sent so far."""

    def next_limit(self) -> float:
        """Return how long the next chunk may take. Raises TransferStopped when it is not to come."""
        left = self.deadline - time.monotonic()
        if self.stopped.is_set() or left <= 0:
            raise TransferStopped("cancelled" if self.stopped.is_set() else "out of time")
        return min(left, self.stall_s)

    def last_limit(self) -> float:
        """Return how long a chunk may take of which nothing is left to do but to wait."""
        return min(max(self.deadline - time.monotonic(), 0.0), self.stall_s)

    def throttle(self, nbytes: int) -> None:
        """Wait until a slower network would have brought so much more: what is sent then arrives at once."""
        if self._next_at is None:
            self._next_at = time.monotonic() + self.delay_s
        self._next_at += nbytes / self.bytes_per_s if self.bytes_per_s else 0.0
        due = min(self._next_at, self.deadline)
        while (left := due - time.monotonic()) > 0 and not self.stopped.is_set():
            self.stopped.wait(min(left, 0.05))
