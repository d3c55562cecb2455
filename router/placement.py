"""Places a request: asks index, load and policy, and remembers at once what the choice will cause."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kvhive.proto.errors import ConfigError, InvalidRequest, Unavailable
from kvhive.router.kv_index import KvIndex
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PreparedPrompt
from kvhive.router.routing_policy import (
    Candidate,
    Decision,
    RouteRequest,
    RoutingPolicy,
    Speed,
    compare,
)
from kvhive.router.worker_registry import WorkerRegistry, WorkerView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes."""

    worker_id: str
    address: str
    epoch: int
    decision: Decision
    reachable_tokens: int
    """The most prompt tokens that any worker it may go to holds now, in full blocks."""


@dataclass(frozen=True, slots=True)
class RoutingState:
    """What routing reads: who is there, what they hold, what is on its way to them."""

    registry: WorkerRegistry
    index: KvIndex
    predicted: PredictedBlocks
    loads: LoadTracker


class Placer:
    """Chooses a worker and records the choice. Runs on the event loop; takes microseconds per worker."""

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
        self._block_size = block_size
        self._stale_after_s = stale_after_s
        self._clock = clock

    def place(
        self, request_id: str, prompt: PreparedPrompt, max_tokens: int, avoid: Collection[str] = ()
    ) -> Placement:
        """Choose a worker, avoiding those that just failed this request, and reserve its load.

        Raises Unavailable when no worker serves, InvalidRequest when no pool could ever hold the request.
        """
        now = self._clock()
        views = {view.record.worker_id: view for view in self._state.registry.routable(now)}
        views = {worker_id: view for worker_id, view in views.items() if worker_id not in avoid}
        if not views:
            raise Unavailable("no worker is serving now, retry")
        # An index nobody has heard of for too long is no advice at all: go by load and home alone.
        fresh = self._state.index.staleness_s() <= self._stale_after_s
        matches = self._state.index.match(prompt.keys) if fresh else {}
        candidates = [
            self._candidate(view, matches.get(worker_id, 0), prompt, now) for worker_id, view in views.items()
        ]
        route = RouteRequest(
            len(prompt.token_ids), max_tokens, self._block_size, prompt.home_key, prompt.keyed
        )
        decision = self._decide(route, candidates)
        self._record(request_id, prompt, decision, now)
        best = max((matches.get(worker_id, 0) for worker_id in views), default=0)
        record = views[decision.worker_id].record
        log.debug("request=%s decision=%s", request_id, decision)
        return Placement(record.worker_id, record.address, record.epoch, decision, best * self._block_size)

    def _decide(self, route: RouteRequest, candidates: list[Candidate]) -> Decision:
        """Ask the policy of those that could hold the request, and complete its answer."""
        need = route.prompt_tokens + route.max_tokens
        fitting = [candidate for candidate in candidates if candidate.capacity_tokens >= need]
        if not fitting:
            raise _never_fits(route, candidates)
        decision = self._policy.decide(route, fitting)
        if decision is None:
            raise Unavailable("the routing policy chose no worker, retry")
        if not any(candidate.worker_id == decision.worker_id for candidate in fitting):
            raise ConfigError(f"router.policy: it chose {decision.worker_id!r}, which is no candidate")
        excluded = {
            candidate.worker_id: f"its pool holds {candidate.capacity_tokens} tokens, {need} are needed"
            for candidate in candidates
            if candidate.capacity_tokens < need
        }
        costs = decision.costs or compare(route, fitting)
        return replace(decision, costs=costs, excluded={**excluded, **decision.excluded})

    def _candidate(self, view: WorkerView, matched: int, prompt: PreparedPrompt, now: float) -> Candidate:
        record, load, state = view.record, view.record.load, self._state
        worker_id = record.worker_id
        return Candidate(
            worker_id=worker_id,
            matched_blocks=matched,
            expected_blocks=state.predicted.extend_match(worker_id, prompt.keys, matched, now),
            queue_tokens=state.loads.queue_tokens(worker_id, load.queued_prefill_tokens, view.reported_at),
            decoding=max(load.running, state.loads.in_flight(worker_id)),
            speed=Speed(
                load.step_base_s, load.step_per_token_s, load.step_per_attention_s, load.max_step_tokens
            ),
            victim_age_s=None if load.victim_age_s < 0 else load.victim_age_s,
            free_tokens=load.blocks_free * record.block_size,
            capacity_tokens=load.blocks_total * record.block_size,
            recent_cold_tokens=state.loads.recent_cold_tokens(worker_id, now),
            requests=max(load.running + load.waiting, state.loads.in_flight(worker_id)),
        )

    def _record(self, request_id: str, prompt: PreparedPrompt, decision: Decision, now: float) -> None:
        chosen = next(cost for cost in decision.costs if cost.worker_id == decision.worker_id)
        uncached = len(prompt.token_ids) - chosen.expected_blocks * self._block_size
        self._state.loads.reserve(request_id, decision.worker_id, max(1, uncached), now)
        self._state.predicted.add(decision.worker_id, prompt.keys[chosen.matched_blocks :], now)


def _never_fits(route: RouteRequest, candidates: list[Candidate]) -> InvalidRequest:
    largest = max(candidate.capacity_tokens for candidate in candidates)
    return InvalidRequest(
        "max_tokens",
        f"prompt ({route.prompt_tokens} tokens) and max_tokens ({route.max_tokens}) need "
        f"{route.prompt_tokens + route.max_tokens} tokens of KV, the largest pool holds {largest}",
    )
