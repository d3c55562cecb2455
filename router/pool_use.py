"""What the requests of this router hold in the workers' pools, beyond what the workers' last reports contain.

A report is up to a heartbeat old, and in half a second a small pool can fill or empty. And of what a report
says is in use, only the router knows how much is the beginning of the prompt that it is about to place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvhive.proto.block_hash import BlockKey

SETTLE_S = 0.05
"""From routing a request until the worker's reports contain it: the way there, and the step that runs."""

LONGEST_MEMORY_S = 5.0
"""What ended that long ago is in every report that counts."""


@dataclass(frozen=True, slots=True)
class _Held:
    keys: Sequence[BlockKey]
    tokens: int
    """What it added to the pool's use: its prompt, less what others there were using already."""
    routed_at: float


class PoolUse:
    """Requests in flight by worker, with their prompts' blocks; bounded by what runs and has just ended."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, _Held]] = {}  # worker -> request -> what it holds
        self._worker_of: dict[str, str] = {}
        self._ended: dict[str, deque[tuple[float, _Held]]] = {}

    def enter(
        self, request_id: str, worker_id: str, keys: Sequence[BlockKey], tokens: int, now: float
    ) -> None:
        """A request was routed; `tokens` is what its prompt adds to what is in use there."""
        self._worker_of[request_id] = worker_id
        self._held.setdefault(worker_id, {})[request_id] = _Held(keys, tokens, now)

    def leave(self, request_id: str, now: float) -> None:
        """It has ended, or gone elsewhere. Idempotent."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is None:
            return
        held = self._held[worker_id].pop(request_id)
        if not self._held[worker_id]:
            del self._held[worker_id]
        ended = self._ended.setdefault(worker_id, deque())
        ended.append((now, held))
        while ended[0][0] < now - LONGEST_MEMORY_S:
            ended.popleft()

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left; its requests are still to end, or to go elsewhere."""
        self._ended.pop(worker_id, None)
        for request_id in self._held.pop(worker_id, {}):
            del self._worker_of[request_id]

    def tokens(self, worker_id: str, reported: int, reported_at: float) -> int:
        """Tokens in use at a worker, or waiting to be: what it reported, corrected by what happened since."""
        tokens = reported
        for held in self._held.get(worker_id, {}).values():
            if held.routed_at + SETTLE_S >= reported_at:
                tokens += held.tokens
        ended = self._ended.get(worker_id)
        if ended:
            while ended and ended[0][0] < reported_at:
                ended.popleft()
            tokens -= sum(held.tokens for _, held in ended if held.routed_at + SETTLE_S < reported_at)
        return max(0, tokens)

    def shared_blocks(self, worker_id: str, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a prompt are in use by other requests of this router at a worker."""
        longest = 0
        for held in self._held.get(worker_id, {}).values():
            most = min(len(held.keys), len(keys))
            if longest < most and held.keys[longest] == keys[longest]:  # else it shares no more than that
                longest = _common(held.keys, keys, longest + 1, most)
        return longest


def _common(one: Sequence[BlockKey], other: Sequence[BlockKey], low: int, high: int) -> int:
    """The length of the common beginning, between `low` and `high`.

    A key stands for all that is before it, so halving finds it.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
