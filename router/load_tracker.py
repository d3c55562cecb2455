"""What this router has sent to each worker that the worker's last report cannot contain yet.

A report is up to a heartbeat old. A request counts on top of it until a report confirms it, which one made
SETTLE_S after it was routed does, or until its first token; one that was in the report and has got its first
token since is taken off again, also when it is over. So a burst is spread within milliseconds, nothing is
counted twice for long, and who asks again at once finds its worker as idle as it is.

Cold work, which decides who takes new prompts of equal cost, is taken from the workers' reports as well: they
count the uncached tokens of all routers' requests, so that all routers see the same, whoever sent them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvhive.proto.block_hash import BlockKey
from kvhive.router.pool_use import SETTLE_S, PoolUse

Rate = npt.NDArray[np.float64]

COLD_HALF_LIFE_S = 60.0
"""How long cold work that was sent to a worker weighs in the choice of a home."""

MAX_ENDED = 128
"""Requests of one worker that ended since its last report; more than these are not taken off it."""

LEAST_SHARE = 0.05
"""A rate that was watched for only a few seconds: the sum is taken to have this share of its final size."""


@dataclass(slots=True)
class _Reservation:
    tokens: int
    routed_at: float
    first_token_at: float | None = None


@dataclass(slots=True)
class _Fading:
    """A number of tokens that halves every COLD_HALF_LIFE_S seconds."""

    tokens: float = 0.0
    as_of: float = -math.inf

    def at(self, now: float) -> float:
        return self.tokens * math.pow(0.5, max(0.0, now - self.as_of) / COLD_HALF_LIFE_S)

    def add(self, tokens: float, now: float) -> None:
        self.tokens, self.as_of = max(0.0, self.at(now) + tokens), max(now, self.as_of)


@dataclass(slots=True)
class _ColdWork:
    sent: _Fading
    """By this router, and not yet in a report."""
    reported: _Fading
    """By all routers."""
    since: float
    """When this router first heard of it."""
    total: int | None = None
    """The worker's count, which only grows while it lives."""


class LoadTracker:
    """This router's requests in flight, and recent cold work per worker. Bounded by what is in flight."""

    def __init__(self) -> None:
        self._worker_of: dict[str, str] = {}
        self._reservations: dict[str, dict[str, _Reservation]] = {}  # worker -> request -> reservation
        self._ended: dict[str, deque[_Reservation]] = {}  # worker -> whose prompts its report may still count
        self._cold: dict[str, _ColdWork] = {}
        self._changed: set[str] = set()
        self._pools = PoolUse()

    def reserve(
        self,
        request_id: str,
        worker_id: str,
        uncached_tokens: int,
        now: float,
        keys: Sequence[BlockKey] = (),
        new_tokens: int = 0,
    ) -> None:
        """Count a request that was just routed: `new_tokens` is what it adds to the pool's use."""
        self.finish(request_id, now)
        self._pools.enter(request_id, worker_id, keys, new_tokens, now)
        self._worker_of[request_id] = worker_id
        self._reservations.setdefault(worker_id, {})[request_id] = _Reservation(uncached_tokens, now)
        self._cold_work(worker_id, now).sent.add(uncached_tokens, now)
        self._changed.add(worker_id)

    def first_token(self, request_id: str, now: float) -> None:
        """The request's prompt is computed; it decodes now. Later tokens change nothing."""
        worker_id = self._worker_of.get(request_id)
        if worker_id is not None:
            reservation = self._reservations[worker_id][request_id]
            if reservation.first_token_at is None:
                reservation.first_token_at = now
                self._changed.add(worker_id)

    def finish(self, request_id: str, now: float) -> None:
        """Forget a request, however it ended. Idempotent."""
        self._pools.leave(request_id, now)
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            reservation = self._reservations[worker_id].pop(request_id)
            if reservation.first_token_at is not None:
                self._ended.setdefault(worker_id, deque(maxlen=MAX_ENDED)).append(reservation)
            if not self._reservations[worker_id]:
                del self._reservations[worker_id]
            self._changed.add(worker_id)

    def report_cold(self, worker_id: str, total: int, now: float) -> None:
        """Take in a worker's count of all uncached prompt tokens it was ever sent, by whatever router.

        What it grew by confirms what this router has sent. A smaller count is that of a new process.
        """
        cold = self._cold_work(worker_id, now)
        grown = 0 if cold.total is None else max(0, total - cold.total)
        if grown:
            cold.reported.add(grown, now)
            cold.sent.add(-grown, now)
        cold.total = total

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left."""
        self._cold.pop(worker_id, None)
        self._ended.pop(worker_id, None)
        self._pools.drop(worker_id)
        self._changed.add(worker_id)

    def requests(self) -> int:
        """Requests that are expected at some worker."""
        return len(self._worker_of)

    def take_changed(self) -> set[str]:
        """Return the workers of which something changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def queue_tokens(
        self, worker_id: str, reported: int, reported_at: float, per_token_s: float = 0.0
    ) -> int:
        """Prompt tokens ahead at a worker: what it reported, corrected by what happened since.

        A prompt that is ready was in the report with what was left of it then, which is not known; it was no
        more than the worker can have computed since, at `per_token_s` seconds a token.
        """
        tokens, computed, ready_at = reported, 0, reported_at
        running = self._reservations.get(worker_id, {}).values()
        for reservation in chain(running, self._ended_since(worker_id, reported_at)):
            if reservation.routed_at + SETTLE_S >= reported_at:
                tokens += reservation.tokens if reservation.first_token_at is None else 0
            elif reservation.first_token_at is not None and reservation.first_token_at >= reported_at:
                computed += reservation.tokens
                ready_at = max(ready_at, reservation.first_token_at)
        if per_token_s > 0:
            computed = min(computed, int((ready_at - reported_at) / per_token_s))
        return max(0, tokens - computed)

    def _ended_since(self, worker_id: str, reported_at: float) -> Sequence[_Reservation]:
        ended = self._ended.get(worker_id)
        while ended and (ended[0].first_token_at or 0.0) < reported_at:  # no later report counts them either
            ended.popleft()
        return ended or ()

    def pool_tokens(self, worker_id: str, reported: int, reported_at: float) -> int:
        """See PoolUse.tokens."""
        return self._pools.tokens(worker_id, reported, reported_at)

    def shared_blocks(self, worker_id: str, keys: Sequence[BlockKey]) -> int:
        """See PoolUse.shared_blocks."""
        return self._pools.shared_blocks(worker_id, keys)

    def in_flight(self, worker_id: str) -> int:
        """Requests of this router at a worker."""
        return len(self._reservations.get(worker_id, ()))

    def recent_cold_tokens(self, worker_id: str, now: float) -> float:
        """Uncached prompt tokens sent to a worker, halved every COLD_HALF_LIFE_S seconds."""
        cold = self._cold.get(worker_id)
        return cold.sent.at(now) + cold.reported.at(now) if cold else 0.0

    def cold_since(self, worker_id: str, now: float) -> float:
        """When this router first heard of a worker's cold work; now, if it never has."""
        cold = self._cold.get(worker_id)
        return cold.since if cold else now

    def _cold_work(self, worker_id: str, now: float) -> _ColdWork:
        if worker_id not in self._cold:
            self._cold[worker_id] = _ColdWork(_Fading(), _Fading(), now)
        return self._cold[worker_id]


def per_second(recent_tokens: Rate, seconds: Rate) -> Rate:
    """Turn recent cold tokens into tokens per second, when they have been watched for so many seconds."""
    share = np.maximum(LEAST_SHARE, 1.0 - np.exp2(-seconds / COLD_HALF_LIFE_S))
    return recent_tokens * (math.log(2) / COLD_HALF_LIFE_S) / share
