"""The last decisions, so that it can be said why a request went where it did: bounded, without any text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.placement import Placement
from kvhive.router.routing_policy import CandidateCost

MAX_DECISIONS = 4096
MAX_ROWS = 200_000
"""Candidates of all decisions that are kept, and workers that were none, at about 300 bytes each: with a
thousand workers the last two hundred decisions."""
MAX_CANDIDATES = 64
"""Of one explanation, and as many workers that were none."""
MAX_EXPLAINED = 16
"""Decisions of one id, which its caller chose: the answer is made on the event loop."""


@dataclass(slots=True)
class LedgerEntry:
    """One decision, as it was made."""

    request_id: str
    tenant: str
    made_at: float
    prompt_tokens: int
    placement: Placement
    moves: int
    """Workers that the request had been sent to before."""
    cached_tokens: int | None = None
    """What the worker found in its pool, once it has said so."""


class DecisionLedger:
    """Remembers decisions, the newest; noting one is O(1)."""

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float],
        most: int = MAX_DECISIONS,
        most_rows: int = MAX_ROWS,
    ) -> None:
        self._block_size = block_size
        self._clock = clock
        self._most, self._most_rows = most, most_rows
        self._entries: deque[LedgerEntry] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(
        self, request_id: str, tenant: str, prompt_tokens: int, placement: Placement, moves: int
    ) -> LedgerEntry:
        """Remember where a request is sent, and forget what is too old; the newest is always kept."""
        entry = LedgerEntry(request_id, tenant, self._clock(), prompt_tokens, placement, moves)
        self._entries.append(entry)
        self._rows += _rows(entry)
        while len(self._entries) > self._most or (self._rows > self._most_rows and len(self._entries) > 1):
            self._rows -= _rows(self._entries.popleft())
        return entry

    def explain(self, request_id: str, tenant: str | None = None) -> pb.ExplainResponse:
        """Return the newest that is remembered of a request id, of one tenant alone where one is given.

        O(decisions).
        """
        now = self._clock()
        theirs = (
            entry
            for entry in reversed(self._entries)
            if entry.request_id == request_id and tenant in (None, entry.tenant)
        )
        newest = list(islice(theirs, MAX_EXPLAINED))
        return pb.ExplainResponse(decisions=[self._described(entry, now) for entry in reversed(newest)])

    def _described(self, entry: LedgerEntry, now: float) -> pb.RouteDecision:
        placement = entry.placement
        decision = placement.decision
        return pb.RouteDecision(
            request_id=entry.request_id,
            age_s=now - entry.made_at,
            worker_id=placement.worker_id,
            reason=decision.reason.value,
            prompt_tokens=entry.prompt_tokens,
            reachable_tokens=placement.reachable_tokens,
            cached_tokens=entry.cached_tokens,
            predicted_ttft_s=placement.predicted_ttft_s,
            pull_from=placement.source.worker_id if placement.source else "",
            moves=entry.moves,
            candidates=self._candidates(placement),
            excluded=dict(islice(decision.excluded.items(), MAX_CANDIDATES)),
        )

    def _candidates(self, placement: Placement) -> Iterator[pb.RouteCandidate]:
        """Yield the chosen one, then the cheapest of the others."""
        costs = sorted(
            placement.decision.costs, key=lambda cost: (cost.worker_id != placement.worker_id, cost.cost_s)
        )
        return (self._candidate(cost) for cost in costs[:MAX_CANDIDATES])

    def _candidate(self, cost: CandidateCost) -> pb.RouteCandidate:
        return pb.RouteCandidate(
            worker_id=cost.worker_id,
            matched_tokens=cost.matched_blocks * self._block_size,
            expected_tokens=cost.expected_blocks * self._block_size,
            cost_s=cost.cost_s,
            queue_s=cost.queue_s,
            room_s=cost.room_s,
            price=cost.price,
            compute_s=cost.compute_s,
            decode_s=cost.decode_s,
            pull_s=cost.pull_s,
        )


def _rows(entry: LedgerEntry) -> int:
    decision = entry.placement.decision
    return len(decision.costs) + len(decision.excluded)
