"""Blocks that just-routed requests are about to create: they count until confirmed or timed out.

Without them a burst of equal prompts would be routed by an index that cannot know yet what the first of
them is computing. A prediction is weaker than the index: it only ever extends a confirmed match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvhive.proto.block_hash import BlockKey

MAX_ENTRIES = 262_144
"""4 million tokens of prompts in flight at 16 tokens a block, in about 60 MB."""


class PredictedBlocks:
    """A bounded map (worker, key) -> expiry. For the event loop's thread. `now` is monotonic, in seconds.

    Chains enter tail first, so that the bound takes tails before the blocks they hang on.
    """

    def __init__(self, ttl_s: float, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._expiry: OrderedDict[tuple[str, BlockKey], float] = OrderedDict()
        self._of_worker: dict[str, set[BlockKey]] = {}

    def __len__(self) -> int:
        return len(self._expiry)

    def add(self, worker_id: str, keys: Sequence[BlockKey], now: float) -> None:
        """Expect a worker to hold these blocks soon; again renews them. O(keys)."""
        if not keys:
            return
        own = self._of_worker.setdefault(worker_id, set())
        for key in reversed(keys):
            entry = (worker_id, key)
            self._expiry[entry] = now + self._ttl_s
            self._expiry.move_to_end(entry)
            own.add(key)
        self._trim(now)

    def extend_match(self, worker_id: str, keys: Sequence[BlockKey], confirmed: int, now: float) -> int:
        """Return how many leading blocks of `keys` the worker holds or will hold, at least `confirmed`."""
        own = self._of_worker.get(worker_id)
        if not own:
            return confirmed
        length = confirmed
        while length < len(keys) and self._expiry.get((worker_id, keys[length]), now) > now:
            length += 1
        return length

    def forget(self, worker_id: str, keys: Iterable[BlockKey]) -> None:
        """These blocks are confirmed, or will not come after all."""
        own = self._of_worker.get(worker_id)
        if own is None:
            return
        for key in keys:
            if self._expiry.pop((worker_id, key), None) is not None:
                own.discard(key)
        if not own:
            del self._of_worker[worker_id]

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left or begun a new epoch; O(own predictions)."""
        for key in self._of_worker.pop(worker_id, ()):
            del self._expiry[(worker_id, key)]

    def _trim(self, now: float) -> None:
        """One ttl for all: the least recently added are the first to expire and the first to go."""
        while self._expiry:
            (worker_id, key), expiry = next(iter(self._expiry.items()))
            if expiry > now and len(self._expiry) <= self._max_entries:
                return
            self.forget(worker_id, (key,))
