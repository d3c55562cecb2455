"""Consistent hashing with bounded loads: the home, unless it has more than its share. For comparison.

The home is that of `kv_aware`: rendezvous hashing of the cache_key or of the first blocks. A worker with more
than LOAD_BOUND times the mean of all requests in flight passes on to the next in the request's own order, as
in Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvhive.router.candidate_table import CandidateTable
from kvhive.router.rendezvous import home_scores
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest

LOAD_BOUND = 1.25
"""Times the mean number of requests, this one included: the paper's usual choice."""


class ConsistentHash:
    """Blind to what workers hold: a prefix is found again because its home stays."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        table = CandidateTable.of(candidates)
        bound = math.ceil(LOAD_BOUND * (table.requests.sum() + 1) / len(table))
        order = home_scores(request.home_key, table.seeds).argsort()[::-1]
        row = next(row for row in order if table.requests[row] < bound)
        reason = RouteReason.HOME if row == order[0] else RouteReason.BALANCE
        return Decision(table.worker_ids[row], reason)
