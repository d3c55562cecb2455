"""Least loaded: the fewest requests, then the fewest queued prompt tokens. For comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest


class LeastLoaded:
    """Of all workers; equals by chance, because with any fixed order idle clusters would use one worker."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        least = min(map(load_of, candidates))
        equals = [candidate.worker_id for candidate in candidates if load_of(candidate) == least]
        return Decision(self._random.choice(equals), RouteReason.LOAD)


def load_of(candidate: Candidate) -> tuple[int, int]:
    """What is compared: requests there, running or waiting, then prompt tokens still to be computed."""
    return candidate.requests, candidate.queue_tokens
