"""Consistent hashing with bounded loads: the home, unless it has more than its share. For comparison.

The home is that of `kv_aware`: rendezvous hashing of the cache_key or of the first blocks. A worker with more
than LOAD_BOUND times the mean of all requests in flight passes on to the next in the request's own order, as
in Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest, home_order

LOAD_BOUND = 1.25
"""Times the mean number of requests, this one included: the paper's usual choice."""


class ConsistentHash:
    """Blind to what workers hold: a prefix is found again because its home stays."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        requests = {candidate.worker_id: candidate.requests for candidate in candidates}
        bound = math.ceil(LOAD_BOUND * (sum(requests.values()) + 1) / len(requests))
        order = home_order(request.home_key, requests)
        chosen = next(worker_id for worker_id in order if requests[worker_id] < bound)
        return Decision(chosen, RouteReason.HOME if chosen == order[0] else RouteReason.BALANCE)
