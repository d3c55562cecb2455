"""Power of two choices: the less loaded of two workers drawn by chance. For comparison.

With many routers or late reports the least loaded of all draws everybody at once; two choices do not herd.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest


class PowerOfTwo:
    """O(1) in the number of workers."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        less = min(drawn, key=lambda candidate: (candidate.requests, candidate.queue_tokens))
        return Decision(less.worker_id, RouteReason.LOAD)
