"""Places a request: asks index, load and policy, and remembers at once what the choice will cause."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from kvhive.router.candidate_table import CandidateTable, Column, greatest, least
from kvhive.router.fleet import Fleet
from kvhive.router.kv_index import KvIndex
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.predicted_ttft import predicted_ttft_s
from kvhive.router.prompt import PreparedPrompt
from kvhive.router.routing_cost import CostTable, compare
from kvhive.router.routing_policy import Decision, RouteReason, RouteRequest, RoutingPolicy
from kvhive.router.worker_registry import WorkerRegistry, WorkerView

log = logging.getLogger(__name__)


class NobodyServes(Unavailable):
    """There is no worker that the request may go to now."""


class TooLate(Overloaded):
    """The first token would come later, on every worker, than it is waited for."""

    def __init__(self, predicted_s: float, within_s: float) -> None:
        """Say when it would come, and until when it was waited for, in seconds from now."""
        super().__init__(
            f"the first token is expected in {predicted_s:.1f} s or later, the limit is {within_s:.1f} s",
            cause="predicted_ttft",
            retry_after_s=predicted_s - within_s,
        )


@dataclass(frozen=True, slots=True)
class PullSource:
    """Another worker, from which the beginning of the prompt comes faster than it is computed."""

    worker_id: str
    address: str
    epoch: int
    blocks: int
    """Leading blocks that the index says it holds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes."""

    worker_id: str
    address: str
    epoch: int
    decision: Decision
    matched_blocks: int
    """What the index says it holds."""
    expected_blocks: int
    """What it will hold by then, with what is on its way."""
    reachable_tokens: int
    """The most prompt tokens that any worker it may go to holds now, in full blocks."""
    source: PullSource | None = None
    """Where it is to pull from; None: nowhere."""
    predicted_ttft_s: float = 0.0
    """When its first token is expected, in seconds from when it was placed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request asks of its place."""

    priority: int = 0
    within_s: float = math.inf
    """Its first token is not waited for longer."""


ANY = Terms()


@dataclass(frozen=True, slots=True)
class RoutingState:
    """What routing reads: who is there, what they hold, what is on its way to them."""

    registry: WorkerRegistry
    index: KvIndex
    predicted: PredictedBlocks
    loads: LoadTracker


class Placer:
    """Chooses a worker and records the choice. Runs on the event loop; takes microseconds."""

    def __init__(
        self,
        state: RoutingState,
        policy: RoutingPolicy,
        block_size: int,
        stale_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._policy = policy
        self.block_size = block_size
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._fleet = Fleet(state.loads)

    def place(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        max_tokens: int,
        avoid: Collection[str] = (),
        terms: Terms = ANY,
    ) -> Placement:
        """Choose a worker, avoiding those that just failed this request, and reserve its load.

        Raises NobodyServes, TooLate when every worker would take longer than the terms say, InvalidRequest
        when no pool could ever hold the request.
        """
        placement = self.weigh(prompt, max_tokens, avoid, terms)
        worker_id, now = placement.worker_id, self._clock()
        loads, size, tokens = self._state.loads, self.block_size, len(prompt.token_ids)
        pulled = placement.source.blocks if placement.source else 0
        uncached = max(1, tokens - max(placement.expected_blocks, pulled) * size)
        new = tokens - loads.shared_blocks(worker_id, prompt.keys) * size
        loads.reserve(request_id, worker_id, uncached, now, prompt.keys, new)
        self._state.predicted.add(worker_id, prompt.keys[placement.matched_blocks :], now)
        self._state.registry.placed(worker_id)
        log.debug("request=%s decision=%s", request_id, placement.decision)
        return placement

    def weigh(
        self, prompt: PreparedPrompt, max_tokens: int, avoid: Collection[str] = (), terms: Terms = ANY
    ) -> Placement:
        """Say where a request would go now, and record nothing. Raises as `place` does."""
        now, state, fleet = self._clock(), self._state, self._fleet
        fleet.update(self._worth_trying(avoid, now), now)
        # An index nobody has heard of for too long is no advice at all: go by load and home alone.
        fresh = state.index.staleness_s() <= self._stale_after_s
        matches = state.index.match(prompt.keys) if fresh else {}
        soon = state.predicted.extend(prompt.keys, matches, now)
        everybody = fleet.candidates(matches, soon, now, terms.priority)
        need = len(prompt.token_ids) + max_tokens
        allowed = everybody
        if avoid:
            allowed = everybody.where([worker_id not in avoid for worker_id in everybody.worker_ids])
        if not allowed:
            raise NobodyServes("no worker is serving now, retry")
        table = allowed.where(allowed.capacity_tokens >= need)
        if not table:
            raise self._none_fits(len(prompt.token_ids), max_tokens)
        route = RouteRequest(
            len(prompt.token_ids), max_tokens, self.block_size, prompt.home_key, prompt.keyed
        )
        self._note_shared(route, table, prompt.keys)
        costs, decision = self._decide(route, table)
        ttft_s = predicted_ttft_s(route.prompt_tokens, table, costs)
        row = table.worker_ids.index(decision.worker_id)
        if ttft_s[row] > terms.within_s:
            row = _in_time(ttft_s, costs, terms.within_s)
            decision = replace(decision, worker_id=table.worker_ids[row], reason=RouteReason.LOAD)
        reasons = state.registry.excluded(now)
        excluded = {each: why for each, why in reasons.items() if each not in everybody.worker_ids}
        if len(table) < len(everybody):
            excluded |= dict.fromkeys(avoid, "it was lost or full with this request")
            small = set(allowed.worker_ids) - set(table.worker_ids)
            excluded |= dict.fromkeys(small, f"its pool cannot hold {need} tokens")
        view, source = fleet.view(decision.worker_id), self._source(table, row, costs)
        if source is not None:
            decision = replace(decision, pull_from=source.worker_id)
        return Placement(
            worker_id=decision.worker_id,
            address=view.record.address,
            epoch=view.record.epoch,
            decision=replace(decision, excluded=excluded) if excluded else decision,
            matched_blocks=int(table.matched_blocks[row]),
            expected_blocks=int(table.expected_blocks[row]),
            reachable_tokens=int(greatest(table.matched_blocks)) * self.block_size,
            source=source,
            predicted_ttft_s=float(ttft_s[row]),
        )

    def _none_fits(self, prompt_tokens: int, max_tokens: int) -> NobodyServes | InvalidRequest:
        """Say why no pool that may be asked holds the request: none could, or those that could may not be."""
        loads = [(v.record.load.blocks_total, v.record.block_size) for v in self._state.registry.serving()]
        largest = max((blocks * size for blocks, size in loads), default=0)
        if not largest:
            return NobodyServes("no worker has said yet how much its pool holds, retry")
        if prompt_tokens + max_tokens <= largest:
            return NobodyServes(
                f"{prompt_tokens + max_tokens} tokens fit only workers that were lost or are full now, retry"
            )
        return _never_fits(prompt_tokens, max_tokens, largest)

    def _worth_trying(self, avoid: Collection[str], now: float) -> list[WorkerView]:
        """Return the workers to choose from. Where nobody else is left, one that has failed others is better
        than a refusal: it may be well by now, and saying so costs it a failover."""
        up = self._state.registry.routable(now)
        if all(view.record.worker_id in avoid for view in up):
            return self._state.registry.serving()
        return up

    def _source(self, table: CandidateTable, row: int, costs: CostTable) -> PullSource | None:
        """Name where the chosen worker is to pull from, whatever the policy that chose it."""
        if greatest(table.matched_blocks) <= table.expected_blocks[row]:
            return None  # the usual case
        pulls = costs.pulls
        if not pulls.blocks[row]:
            return None
        record = self._fleet.view(table.worker_ids[pulls.source]).record
        return PullSource(record.worker_id, record.address, record.epoch, int(pulls.blocks[row]))

    def _note_shared(self, route: RouteRequest, table: CandidateTable, keys: Sequence[BlockKey]) -> None:
        """Where room may be short, say how much of the prompt is in use there anyway."""
        short = table.live_tokens + table.growth_tokens + route.prompt_tokens > table.capacity_tokens
        if not np.count_nonzero(short):  # as most of the time
            return
        for row in (short & (table.expected_blocks > 0)).nonzero()[0].tolist():
            blocks = self._state.loads.shared_blocks(table.worker_ids[row], keys)
            table.shared_tokens[row] = blocks * self.block_size

    def _decide(self, route: RouteRequest, table: CandidateTable) -> tuple[CostTable, Decision]:
        """Ask the policy, and complete its answer where it compared otherwise than in seconds."""
        decision = self._policy.decide(route, table)
        if decision is None:
            raise NobodyServes("the routing policy chose no worker, retry")
        if decision.worker_id not in table.worker_ids:
            raise ConfigError(f"router.policy: it chose {decision.worker_id!r}, which is no candidate")
        known = decision.costs
        costs = known if isinstance(known, CostTable) else compare(route, table)
        return costs, (decision if known else replace(decision, costs=costs))


def _in_time(ttft_s: Column, costs: CostTable, within_s: float) -> int:
    """Return the cheapest worker of those that are in time. Raises TooLate."""
    (rows,) = (ttft_s <= within_s).nonzero()
    if not len(rows):
        raise TooLate(least(ttft_s), within_s)
    return int(rows[costs.cost_s[rows].argmin()])


def _never_fits(prompt_tokens: int, max_tokens: int, largest: int) -> InvalidRequest:
    return InvalidRequest(
        "max_tokens",
        f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) need "
        f"{prompt_tokens + max_tokens} tokens of KV, the largest pool holds {largest}",
    )
