"""How fast blocks come to this worker: seconds(pull) = latency + bytes / rate, learnt from its last pulls.

The latency is all that a pull costs whatever its size: asking, pinning between two steps of the source, the
first channel. A least-squares fit in which 10 % off counts alike in short and long pulls. It has no memory
beyond a few pulls, because a network that has become slower must be believed soon: weights of forgotten fast
pulls, which such a fit holds in high regard, would outlive them by hundreds. What was measured long ago is
not told any more, so that somebody tries again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

REMEMBERED = 16
"""Pulls that are fitted."""

STALE_AFTER_S = 300.0
"""After so long without a pull the answer is "not measured": a slow network gets another chance."""


class TransferRate:
    """Learns (latency, bytes per second). For one thread; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pulls: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._fit = (0.0, 0.0)
        self._observed_at = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from one pull that went well, or ran out of time with so much done."""
        self._pulls.append((nbytes, max(seconds, 1e-6)))
        self._fit = _fitted(self._pulls)
        self._observed_at = self._clock()

    def measured(self) -> tuple[float, float]:
        """Return (latency in seconds, bytes per second); zeros while nothing is known, or not any more."""
        return self._fit if self._clock() - self._observed_at < STALE_AFTER_S else (0.0, 0.0)


def _fitted(pulls: deque[tuple[int, float]]) -> tuple[float, float]:
    one = x = xx = y = xy = 0.0
    for nbytes, seconds in pulls:
        weight = seconds**-2
        one += weight
        x += weight * nbytes
        xx += weight * nbytes**2
        y += weight * seconds
        xy += weight * nbytes * seconds
    spread = one * xx - x * x
    if spread > 1e-9 * one * xx:
        per_byte = (one * xy - x * y) / spread
        latency = (y - per_byte * x) / one
        if per_byte > 0 and latency >= 0:
            return latency, 1.0 / per_byte
    # Pulls of one size cannot tell the two apart, and neither can noise: all of it is taken for rate.
    return 0.0, xx / xy
