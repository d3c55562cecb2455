"""How fast blocks come to this worker: seconds(pull) = latency + bytes / rate, learnt from pulls.

The latency is all that a pull costs whatever its size: asking, pinning between two steps of the source, the
first channel. A least-squares fit with exponential forgetting, in which 10 % off counts alike in short and
long pulls. What was measured long ago is not told any more, so that somebody tries again.
"""

from __future__ import annotations

from collections.abc import Callable

FORGETTING = 0.9
"""Weight of an observation after one more: about ten pulls of memory."""

STALE_AFTER_S = 300.0
"""After so long without a pull the answer is "not measured": a slow network gets another chance."""


class TransferRate:
    """Learns (latency, bytes per second). For one thread; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._observed_at = -STALE_AFTER_S

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from one pull that went well, or ran out of time with this much done."""
        weight = 1.0 / max(seconds, 1e-6) ** 2
        new = (weight, weight * nbytes, weight * nbytes**2, weight * seconds, weight * nbytes * seconds)
        self._sums = (
            FORGETTING * self._sums[0] + new[0],
            FORGETTING * self._sums[1] + new[1],
            FORGETTING * self._sums[2] + new[2],
            FORGETTING * self._sums[3] + new[3],
            FORGETTING * self._sums[4] + new[4],
        )
        self._observed_at = self._clock()

    def measured(self) -> tuple[float, float]:
        """Return (latency in seconds, bytes per second); zeros while nothing is known, or not any more."""
        if self._clock() - self._observed_at >= STALE_AFTER_S or not self._sums[0]:
            return 0.0, 0.0
        one, x, xx, y, xy = self._sums
        spread = one * xx - x * x
        if spread > 1e-9 * one * xx:
            per_byte = (one * xy - x * y) / spread
            latency = (y - per_byte * x) / one
            if per_byte > 0 and latency >= 0:
                return latency, 1.0 / per_byte
        # Pulls of one size cannot tell the two apart, and neither can noise: all of it is taken for rate.
        return 0.0, xx / xy if xy > 0 else 0.0
