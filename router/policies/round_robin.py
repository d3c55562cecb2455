"""Round robin: each worker in turn, whatever it holds or does. For comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvhive.router.candidate_table import CandidateTable
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest


class RoundRobin:
    """The next by id after the one that had the last turn, so that leaving and joining skips nobody."""

    def __init__(self, seed: int | None = None) -> None:
        """Begin with any worker: several routers that all began with the first would send it a burst."""
        self._random = random.Random(seed)
        self._last: str | None = None

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        worker_ids = CandidateTable.of(candidates).worker_ids
        if not worker_ids:
            return None
        if self._last is None:
            self._last = self._random.choice(worker_ids)
        last = self._last
        self._last = min((w for w in worker_ids if w > last), default=min(worker_ids))
        return Decision(self._last, RouteReason.TURN)
