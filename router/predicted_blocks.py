"""Blocks that just-routed requests are about to create: they count until confirmed or timed out.

Without them a burst of equal prompts would be routed by an index that cannot know yet what the first of
them is computing. A prediction is weaker than the index: it only ever extends a confirmed match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvhive.proto.block_hash import BlockKey

MAX_ENTRIES = 1_048_576
"""16 million tokens of prompts lately routed, at 16 tokens a block, in at most 100 MB."""


@dataclass(slots=True)
class _Prediction:
    """One request's blocks, some of which may be confirmed or predicted anew by now."""

    worker_id: str
    keys: list[BlockKey]
    expiry: float


class PredictedBlocks:
    """Per worker a map of keys to when they expire. For the event loop's thread. `now` is monotonic seconds.

    The oldest predictions are the first to expire and, at the bound, the first to go, tails before the blocks
    they hang on.
    """

    def __init__(self, ttl_s: float, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._of_worker: dict[str, dict[BlockKey, float]] = {}
        self._predictions: deque[_Prediction] = deque()
        self._entries = 0
        """Keys of all predictions, which bounds those of all workers."""

    def __len__(self) -> int:
        return sum(map(len, self._of_worker.values()))

    def add(self, worker_id: str, keys: Sequence[BlockKey], now: float) -> None:
        """Expect a worker to hold these blocks soon; again renews them. O(keys), a few ns each."""
        if keys:
            expiry = now + self._ttl_s
            self._of_worker.setdefault(worker_id, {}).update(dict.fromkeys(keys, expiry))
            self._predictions.append(_Prediction(worker_id, list(keys), expiry))
            self._entries += len(keys)
        self._trim(now)

    def extend_match(self, worker_id: str, keys: Sequence[BlockKey], confirmed: int, now: float) -> int:
        """Return how many leading blocks of `keys` the worker holds or will hold, at least `confirmed`.

        By bisection: what is predicted beyond a confirmed match is, as the match is, prefix-closed.
        """
        own = self._of_worker.get(worker_id)
        if not own:
            return confirmed
        gone = bisect_left(range(confirmed, len(keys)), True, key=lambda i: own.get(keys[i], now) <= now)
        return confirmed + gone

    def extend(
        self, keys: Sequence[BlockKey], matches: Mapping[str, int], now: float
    ) -> Iterable[tuple[str, int]]:
        """Yield (worker, length) for each worker whose match is longer with its predictions."""
        for worker_id, own in self._of_worker.items():
            confirmed = matches.get(worker_id, 0)
            if confirmed < len(keys) and keys[confirmed] in own:
                yield worker_id, self.extend_match(worker_id, keys, confirmed, now)

    def forget(self, worker_id: str, keys: Iterable[BlockKey]) -> None:
        """These blocks are confirmed, or will not come after all."""
        own = self._of_worker.get(worker_id)
        if own is None:
            return
        for key in keys:
            own.pop(key, None)
        if not own:
            del self._of_worker[worker_id]

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left or begun a new epoch."""
        self._of_worker.pop(worker_id, None)

    def _trim(self, now: float) -> None:
        """Take off what has expired, and what is over the bound."""
        while self._predictions:
            oldest = self._predictions[0]
            over = len(oldest.keys) if oldest.expiry <= now else self._entries - self._max_entries
            if over <= 0:
                return
            cut = max(0, len(oldest.keys) - over)
            own = self._of_worker.get(oldest.worker_id, {})
            # A key that was predicted anew has a later expiry, and stays.
            self.forget(oldest.worker_id, [k for k in oldest.keys[cut:] if own.get(k) == oldest.expiry])
            self._entries -= len(oldest.keys) - cut
            del oldest.keys[cut:]
            if not oldest.keys:
                self._predictions.popleft()
