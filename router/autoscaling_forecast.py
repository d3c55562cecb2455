"""How much prefill work will arrive: its level, its trend and its noise, learnt as it comes.

Double exponential smoothing (Holt, 1957) over samples of at least SAMPLE_S seconds, with time constants in
place of factors, so that it does not matter how often it is told. The noise is measured beside it, of the
differences between one sample and the next, in which a trend is nothing and a jump counts once: the
variance of the work of a second over its mean, which for requests that come as they like is the mean square
of their work over the mean. What is chance in the level is smoothed away for as long as it takes, within
bounds: many small requests show a change within minutes, a few large ones do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SAMPLE_S = 10.0
"""Shorter sums of arrivals are mostly chance, and partly how reports happen to fall."""

CHANCE = 0.03
"""The level is to be right within this share of itself ..."""

QUICKEST_S, SLOWEST_S = 120.0, 1200.0
"""... but to follow a change within a time between these."""

TREND_TIMES = 4.0
"""The trend follows in so many times the time of the level: a day's curve turns within hours."""

YOUNG_S = 60.0
"""What was watched for less is taken to have been nothing before: one early request is no load yet."""

NOISE_S = 1800.0
"""The noise is a mean of about this time."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of the work that arrives, in seconds of prefill per second (that is, in workers)."""

    level: float = 0.0
    trend: float = 0.0
    """Per second."""
    variance: float = 0.0
    """Of the work of one second, the mean of about NOISE_S."""
    mean: float = 0.0
    """The level's own mean of that time."""
    last: float = 0.0
    """The last sample."""
    watched_s: float = 0.0
    """How long it has been watched: a young level is a mean of all there was."""
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

    def after(self, seconds: float) -> float:
        """The level to be expected so much later."""
        return max(0.0, self.level + self.trend * seconds)

    def burst_s(self) -> float:
        """Variance over mean: the work of one request, where all are equal and come as they like."""
        return self.variance / self.mean if self.mean > 0 else 0.0

    def doubt(self) -> float:
        """Standard deviation of the level, for what is chance in its samples."""
        samples_s = max(SAMPLE_S, min(2 * self._memory_s(), self.watched_s))
        return math.sqrt(self.burst_s() * self.level / samples_s)

    def _memory_s(self) -> float:
        """In how much time the level follows."""
        wanted_s = self.burst_s() / (2 * CHANCE**2 * self.level) if self.level > 0 else SLOWEST_S
        return min(max(wanted_s, QUICKEST_S), SLOWEST_S)

    def _sample(self, rate: float, seconds: float) -> Forecast:
        watched_s, memory_s = self.watched_s + seconds, self._memory_s()
        expected = self.level + self.trend * seconds
        level = max(0.0, expected + (rate - expected) * _weight(seconds, memory_s, watched_s))
        trend, variance, mean = self.trend, self.variance, level
        if self.watched_s:
            moved = (level - self.level) / seconds
            trend += (moved - trend) * _weight(seconds, TREND_TIMES * memory_s, math.inf)
            weight = _weight(seconds, NOISE_S, watched_s - SAMPLE_S)
            variance += ((rate - self.last) ** 2 / 2 * seconds - variance) * weight
            mean = self.mean + (level - self.mean) * weight
        return Forecast(level, trend, variance, mean, rate, watched_s)


def _weight(seconds: float, constant_s: float, watched_s: float) -> float:
    """Weight of a sample in an exponential mean, which begins as a plain one."""
    return max(1.0 - math.exp(-seconds / constant_s), seconds / max(seconds, watched_s, YOUNG_S))
