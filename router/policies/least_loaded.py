"""Least loaded: the fewest requests, then the fewest queued prompt tokens. For comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvhive.router.candidate_table import CandidateTable
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest


class LeastLoaded:
    """Of all workers; equals by chance, because with any fixed order idle clusters would use one worker."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        table = CandidateTable.of(candidates)
        loads = list(zip(table.requests.tolist(), table.queue_tokens.tolist(), strict=True))
        least = min(loads)
        row = self._random.choice([row for row, load in enumerate(loads) if load == least])
        return Decision(table.worker_ids[row], RouteReason.LOAD)
