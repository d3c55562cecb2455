"""What this router has sent to each worker that the worker's last report cannot contain yet.

A report is up to a heartbeat old. A request routed after it counts on top of it until its first token;
one that was in it and has got its first token since is taken off again. So a burst is spread within
milliseconds, and nothing is counted twice once the next report comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COLD_HALF_LIFE_S = 60.0
"""How long cold work that was sent to a worker weighs in the choice of a home."""


@dataclass(slots=True)
class _Reservation:
    tokens: int
    routed_at: float
    first_token_at: float | None = None


class LoadTracker:
    """This router's requests in flight, and recent cold work per worker. Bounded by what is in flight."""

    def __init__(self) -> None:
        self._worker_of: dict[str, str] = {}
        self._reservations: dict[str, dict[str, _Reservation]] = {}  # worker -> request -> reservation
        self._cold: dict[str, tuple[float, float]] = {}  # worker -> (tokens, as of)

    def reserve(self, request_id: str, worker_id: str, uncached_tokens: int, now: float) -> None:
        """Count a request that was just routed."""
        self.finish(request_id)
        self._worker_of[request_id] = worker_id
        self._reservations.setdefault(worker_id, {})[request_id] = _Reservation(uncached_tokens, now)
        self._cold[worker_id] = (self.recent_cold_tokens(worker_id, now) + uncached_tokens, now)

    def first_token(self, request_id: str, now: float) -> None:
        """The request's prompt is computed; it decodes now. Later tokens change nothing."""
        worker_id = self._worker_of.get(request_id)
        if worker_id is not None:
            reservation = self._reservations[worker_id][request_id]
            if reservation.first_token_at is None:
                reservation.first_token_at = now

    def finish(self, request_id: str) -> None:
        """Forget a request, however it ended. Idempotent."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            del self._reservations[worker_id][request_id]
            if not self._reservations[worker_id]:
                del self._reservations[worker_id]

    def drop(self, worker_id: str) -> None:
        """Forget a worker that has left."""
        self._cold.pop(worker_id, None)

    def queue_tokens(self, worker_id: str, reported: int, reported_at: float) -> int:
        """Prompt tokens ahead at a worker: what it reported, corrected by what happened since."""
        tokens = reported
        for reservation in self._reservations.get(worker_id, {}).values():
            if reservation.routed_at >= reported_at:
                tokens += reservation.tokens if reservation.first_token_at is None else 0
            elif reservation.first_token_at is not None and reservation.first_token_at >= reported_at:
                tokens -= reservation.tokens
        return max(0, tokens)

    def in_flight(self, worker_id: str) -> int:
        """Requests of this router at a worker."""
        return len(self._reservations.get(worker_id, ()))

    def recent_cold_tokens(self, worker_id: str, now: float) -> float:
        """Uncached prompt tokens sent to a worker, halved every COLD_HALF_LIFE_S seconds."""
        tokens, as_of = self._cold.get(worker_id, (0.0, now))
        return tokens * math.pow(0.5, (now - as_of) / COLD_HALF_LIFE_S)
