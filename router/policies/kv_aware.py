"""The default: the worker where the request costs least, and of equals the home.

Costs (routing_cost.py) that are almost equal are a tie. Of those the longest match wins, and of equally long
ones the cheapest, which also lets a second copy of a prefix that is no longer busy fall idle and be evicted.
Where nothing worth it is held, ties go home by rendezvous hashing of the request's home key, so that equal
cold prompts meet on one worker, on every router alike, and unrelated ones spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhive.router.candidate_table import CandidateTable, greatest, least
from kvhive.router.rendezvous import Seeds, home_scores
from kvhive.router.routing_cost import compare
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest

TIE_SHARE = 0.01
TIE_S = 0.002
"""Costs within 1 % or 2 ms of the best are a tie: what is reported is as old as that. On traces a wider tie,
which is a longer wait at home for some, cost more than homes are worth."""

MINOR_SHARE = 0.125
"""A match of up to an eighth of the prompt counts as none: else a first block that all prompts share would
send everything to the worker that happened to see it first, and the others would stay cold."""

HOME_SLACK = 1.25
"""A home that got more than this times the mean of recent cold work, and one prompt more, passes a newcomer
on (rendezvous hashing with bounded loads), so that unlucky hashes do not leave a worker without work."""

Rows = npt.NDArray[np.intp]


class KvAwarePolicy:
    """Without a state: equal views decide equally."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        table = CandidateTable.of(candidates)
        minor = MINOR_SHARE * request.prompt_tokens / request.block_size
        costs = compare(request, table, minor)
        best = least(costs.cost_s)
        (tied,) = (costs.cost_s <= best + max(TIE_S, TIE_SHARE * best)).nonzero()
        held = table.expected_blocks
        longest = greatest(held)
        if len(table) == 1:
            row, reason = 0, RouteReason.ONLY
        elif longest <= minor:
            row, reason = _cold(request, table, tied)
        else:
            longest_tied = greatest(held[tied])
            holders = tied[held[tied] == longest_tied]
            cheap = costs.cost_s[holders] <= least(costs.cost_s[holders]) + TIE_S
            row = _home(request, table, holders[cheap])
            reason = RouteReason.PREFIX if longest_tied >= longest - minor else RouteReason.REPLICA
        return Decision(table.worker_ids[row], reason, costs)


def _cold(request: RouteRequest, table: CandidateTable, tied: Rows) -> tuple[int, RouteReason]:
    """Choose where nobody holds anything worth it: home if it is among the tied, and has not had too much."""
    scores = home_scores(request.home_key, table.seeds)
    home = int(scores.argmax())
    if not request.keyed:
        recent = table.recent_cold_tokens[tied]
        bound = HOME_SLACK * float(np.add.reduce(recent)) / len(tied) + request.prompt_tokens
        within = tied[recent <= bound]
        if len(within) < len(tied) and home in tied and home not in within:
            return _highest(within, scores), RouteReason.BALANCE
        tied = within
    row = _highest(tied, scores)
    return row, RouteReason.HOME if row == home else RouteReason.LOAD


def _home(request: RouteRequest, table: CandidateTable, rows: Rows) -> int:
    """Return the home among some rows."""
    one = len(rows) == 1
    return int(rows[0]) if one else _highest(rows, home_scores(request.home_key, table.seeds))


def _highest(rows: Rows, scores: Seeds) -> int:
    return int(rows[scores[rows].argmax()])
