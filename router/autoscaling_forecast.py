"""How much prefill work will arrive: its level, its trend and its noise, learnt as it comes.

Double exponential smoothing (Holt, 1957) over samples of at least SAMPLE_S seconds, with time constants in
place of factors, so that it does not matter how often it is told. The noise is measured beside it: the
variance of the work that arrives in a second, which for a Poisson stream of requests is rate x mean square
of their work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SAMPLE_S = 10.0
"""Shorter sums of arrivals are mostly chance, and partly how reports happen to fall."""

LEVEL_S = 240.0
"""The level follows within this time: its own noise is then that of some minutes of arrivals."""

TREND_S = 900.0
"""The trend follows within this time: a day's curve turns within hours."""

NOISE_S = 1800.0
"""The variance is a mean of about this time."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of the work that arrives, in seconds of prefill per second (that is, in workers)."""

    level: float = 0.0
    trend: float = 0.0
    """Per second."""
    variance: float = 0.0
    """Of the work of one second."""
    watched_s: float = 0.0
    """How long it has been watched: a young level is a mean of all there was, not of LEVEL_S."""
    pending_s: float = 0.0
    pending_work_s: float = 0.0
    """Watched since the last sample."""

    def watch(self, work_s_per_s: float, elapsed_s: float) -> Forecast:
        """Take in what arrived in the last `elapsed_s` seconds."""
        seconds = self.pending_s + elapsed_s
        work_s = self.pending_work_s + work_s_per_s * elapsed_s
        if seconds < SAMPLE_S:
            return replace(self, pending_s=seconds, pending_work_s=work_s)
        return self._sample(work_s / seconds, seconds)

    def _sample(self, rate: float, seconds: float) -> Forecast:
        watched_s = self.watched_s + seconds
        expected = self.level + self.trend * seconds
        surprise = rate - expected
        level = max(0.0, expected + surprise * _weight(seconds, LEVEL_S, watched_s))
        trend, variance = self.trend, self.variance
        if self.watched_s:  # the first sample is no surprise
            moved = (level - self.level) / seconds
            trend += (moved - trend) * _weight(seconds, TREND_S, math.inf)
            variance += (surprise**2 * seconds - variance) * _weight(seconds, NOISE_S, watched_s - SAMPLE_S)
        return Forecast(level, trend, variance, watched_s)

    def after(self, seconds: float) -> float:
        """The level to be expected so much later."""
        return max(0.0, self.level + self.trend * seconds)

    def doubt(self) -> float:
        """Standard deviation of the level, for what is chance in its samples."""
        return math.sqrt(self.variance / (2 * min(LEVEL_S, max(SAMPLE_S, self.watched_s / 2))))

    def burst_s(self) -> float:
        """Variance over mean: the work of one request, where all are equal and come as they like."""
        return self.variance / self.level if self.level > 0 else 0.0


def _weight(seconds: float, constant_s: float, watched_s: float) -> float:
    """Weight of a sample in an exponential mean, which begins as a plain one."""
    return max(1.0 - math.exp(-seconds / constant_s), min(1.0, seconds / max(seconds, watched_s)))
