"""What running sequences will still ask of the pool, and how long they will hold what they have.

Nobody knows how long an answer gets; max_tokens is only its bound. However far it has come, a sequence is
expected to go on for the mean length of answers here, and one that is longer already for as long again:
lengths have long tails.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvhive.worker.sequence import Sequence

MEMORY = 32
"""About how many answers the mean is taken over."""

FIRST_GUESS = 200.0
"""Tokens of an answer, before any has ended."""

FORECAST_EVERY_S = 0.25
"""A forecast is kept that long: it is read once a heartbeat, and costs a look at every sequence."""


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """What is expected of the sequences that run."""

    answer_tokens: float = FIRST_GUESS
    """The mean length of answers here."""
    growth_tokens: float = 0.0
    """What all of them together are expected to generate yet."""
    release_tokens: float = 0.0
    """What one of them is expected to generate yet, weighted by what it holds: when its blocks come free."""


class AnswerLengths:
    """Remembers how long answers were. Not thread-safe: the scheduler owns it."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._weight = 0.0
        self._forecast = PoolForecast()
        self._forecast_at = float("-inf")

    def add(self, tokens: int) -> None:
        """An answer has ended with this length."""
        keep = 1.0 - 1.0 / MEMORY
        self._mean = self._mean * keep + tokens / MEMORY
        self._weight = self._weight * keep + 1.0 / MEMORY

    @property
    def mean(self) -> float:
        """The mean length, of late."""
        return self._mean / self._weight if self._weight else FIRST_GUESS

    def remaining(self, seq: Sequence) -> float:
        """How many tokens a sequence is expected to generate yet; never beyond its bound."""
        generated = len(seq.tokens) - seq.prompt_tokens
        return min(seq.max_total - len(seq.tokens), max(self.mean, generated))

    def forecast(self, running: Collection[Sequence], now: float) -> PoolForecast:
        """Say what is expected of these sequences; as of up to FORECAST_EVERY_S ago."""
        if not running:  # an engine at rest reports no more
            return PoolForecast(self.mean)
        if now - self._forecast_at >= FORECAST_EVERY_S:
            held = growth = released = 0.0
            for seq in running:
                remaining, tokens = self.remaining(seq), len(seq.tokens)
                held += tokens
                growth += remaining
                released += tokens * remaining
            self._forecast = PoolForecast(self.mean, growth, released / held if held else 0.0)
            self._forecast_at = now
        return self._forecast
