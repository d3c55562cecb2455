"""What an eviction is likely to cost: how often blocks that are on their way out are still hit.

A cached block that has waited for half as long as the next victim is on its way out, and one of two things
follows: it is hit, or it goes. The share of hits among the two is how likely a victim would have been hit,
had it been kept for as long again.
"""

from __future__ import annotations

FIRST_GUESS = 0.5
GUESS_WEIGHT = 1 / 16
"""Before anything was evicted; counts as this share of the pool's blocks."""


class LateReuse:
    """Counts both; what is older than about one turn of the pool counts less and less."""

    def __init__(self, blocks: int) -> None:
        self._memory = max(1, blocks)
        self._hits = FIRST_GUESS * GUESS_WEIGHT * self._memory
        self._evictions = (1.0 - FIRST_GUESS) * GUESS_WEIGHT * self._memory

    def hit(self) -> None:
        """A block on its way out was hit."""
        self._hits += 1.0
        self._fade()

    def evicted(self) -> None:
        """A block was evicted."""
        self._evictions += 1.0
        self._fade()

    @property
    def share(self) -> float:
        """The share that is hit, between 0 and 1."""
        return self._hits / (self._hits + self._evictions)

    def _fade(self) -> None:
        if self._hits + self._evictions > self._memory:
            self._hits /= 2.0
            self._evictions /= 2.0
