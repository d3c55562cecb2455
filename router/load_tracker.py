"""What this router has sent to each worker that the worker's last report cannot contain yet.

A report is up to a heartbeat old. A request counts on top of it until a report confirms it, which one made
SETTLE_S after it was routed does, or until its first token; one that was in the report and has got its first
token since is taken off again. So a burst is spread within milliseconds, nothing is counted twice for long.

Cold work, which decides who takes new prompts of equal cost, is taken from the workers' reports as well: they
count the uncached tokens of all routers' requests, so that all routers see the same, whoever sent them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COLD_HALF_LIFE_S = 60.0
"""How long cold work that was sent to a worker weighs in the choice of a home."""

SETTLE_S = 0.05
"""From routing a request until the worker's reports contain it: the way there, and the step that runs."""


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
    total: int | None = None
    """The worker's count, which only grows while it lives."""


class LoadTracker:
    """This router's requests in flight, and recent cold work per worker. Bounded by what is in flight."""

    def __init__(self) -> None:
        self._worker_of: dict[str, str] = {}
        self._reservations: dict[str, dict[str, _Reservation]] = {}  # worker -> request -> reservation
        self._cold: dict[str, _ColdWork] = {}
        self._changed: set[str] = set()

    def reserve(self, request_id: str, worker_id: str, uncached_tokens: int, now: float) -> None:
        """Count a request that was just routed."""
        self.finish(request_id)
        self._worker_of[request_id] = worker_id
        self._reservations.setdefault(worker_id, {})[request_id] = _Reservation(uncached_tokens, now)
        self._cold_work(worker_id).sent.add(uncached_tokens, now)
        self._changed.add(worker_id)

    def first_token(self, request_id: str, now: float) -> None:
        """The request's prompt is computed; it decodes now. Later tokens change nothing."""
        worker_id = self._worker_of.get(request_id)
        if worker_id is not None:
            reservation = self._reservations[worker_id][request_id]
            if reservation.first_token_at is None:
                reservation.first_token_at = now
                self._changed.add(worker_id)

    def finish(self, request_id: str) -> None:
        """Forget a request, however it ended. Idempotent."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            del self._reservations[worker_id][request_id]
            if not self._reservations[worker_id]:
                del self._reservations[worker_id]
            self._changed.add(worker_id)

    def report_cold(self, worker_id: str, total: int, now: float) -> None:
        """Take in a worker's count of all uncached prompt tokens it was ever sent, by whatever router.

        What it grew by confirms what this router has sent. A smaller count is that of a new process.
        """
        cold = self._cold_work(worker_id)
        grown = 0 if cold.total is None else max(0, total - cold.total)
        if grown:
            cold.reported.add(grown, now)
            cold.sent.add(-grown, now)
        cold.total = total

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left."""
        self._cold.pop(worker_id, None)
        self._changed.add(worker_id)

    def take_changed(self) -> set[str]:
        """Return the workers of which something changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def queue_tokens(self, worker_id: str, reported: int, reported_at: float) -> int:
        """Prompt tokens ahead at a worker: what it reported, corrected by what happened since."""
        tokens = reported
        for reservation in self._reservations.get(worker_id, {}).values():
            if reservation.routed_at + SETTLE_S >= reported_at:
                tokens += reservation.tokens if reservation.first_token_at is None else 0
            elif reservation.first_token_at is not None and reservation.first_token_at >= reported_at:
                tokens -= reservation.tokens
        return max(0, tokens)

    def in_flight(self, worker_id: str) -> int:
        """Requests of this router at a worker."""
        return len(self._reservations.get(worker_id, ()))

    def recent_cold_tokens(self, worker_id: str, now: float) -> float:
        """Uncached prompt tokens sent to a worker, halved every COLD_HALF_LIFE_S seconds."""
        cold = self._cold.get(worker_id)
        return cold.sent.at(now) + cold.reported.at(now) if cold else 0.0

    def _cold_work(self, worker_id: str) -> _ColdWork:
        if worker_id not in self._cold:
            self._cold[worker_id] = _ColdWork(_Fading(), _Fading())
        return self._cold[worker_id]
