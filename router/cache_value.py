"""What each worker's cache is worth: the seconds of prefill that it has saved of late.

What was hit lately will be hit again: a worker's hits, in the seconds that computing them would have taken,
half forgotten every HALF_LIFE_S. Two caches with equal hits differ by how fast their workers compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhive.proto.index_schema import LoadReport

HALF_LIFE_S = 600.0
"""A conversation that has been silent for so long seldom goes on."""


@dataclass(slots=True)
class _Worth:
    epoch: int
    hits: int
    saved_s: float
    at: float


class CacheValues:
    """Remembers what caches have saved, O(workers). Times are monotonic seconds."""

    def __init__(self) -> None:
        self._worth: dict[str, _Worth] = {}

    def note(self, worker_id: str, epoch: int, load: LoadReport, now: float) -> None:
        """Take in a worker's report. A new epoch begins with nothing."""
        worth = self._worth.get(worker_id)
        if worth is None or worth.epoch != epoch or load.prefix_hits < worth.hits:
            self._worth[worker_id] = _Worth(epoch, load.prefix_hits, 0.0, now)
            return
        saved_s = (load.prefix_hits - worth.hits) * load.step_per_token_s
        worth.saved_s = _faded(worth, now) + saved_s
        worth.hits, worth.at = load.prefix_hits, now

    def value_s(self, worker_id: str, now: float) -> float:
        """Return the seconds that a worker's cache has saved of late; 0 for one that nobody has heard of."""
        worth = self._worth.get(worker_id)
        return _faded(worth, now) if worth else 0.0

    def retain(self, worker_ids: set[str]) -> None:
        """Forget all others."""
        for worker_id in self._worth.keys() - worker_ids:
            del self._worth[worker_id]


def _faded(worth: _Worth, now: float) -> float:
    return worth.saved_s * float(0.5 ** (max(0.0, now - worth.at) / HALF_LIFE_S))
