"""Placing a request over a real registry, mirror, load tracker and policy: what is chosen and remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis
from worker_records import KEYS, LEASE_S, SPEC, Clock, record, register

from kvhive.proto.block_chain import hash_chain
from kvhive.proto.block_hash import block_key, pack_tokens, root_hash
from kvhive.proto.errors import ConfigError, InvalidRequest, Unavailable
from kvhive.proto.index_schema import LoadReport
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import NobodyServes, Placement, Placer, RoutingState
from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PreparedPrompt
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest
from kvhive.router.worker_registry import WorkerRegistry

BLOCK = SPEC.block_size
STALE_AFTER_S = 10.0
LOAD = LoadReport(
    blocks_total=64, blocks_free=64, step_base_s=0.001, step_per_token_s=0.001, max_step_tokens=512
)


@dataclass
class Routing:
    """A placer, what it reads, and the clock of both."""

    placer: Placer
    state: RoutingState
    mirror: KvIndexMirror
    clock: Clock

    def place(
        self, prompt: PreparedPrompt, request_id: str = "r", max_tokens: int = 8, **more: object
    ) -> Placement:
        return self.placer.place(request_id, prompt, max_tokens, **more)  # type: ignore[arg-type]

    def queued(self, worker_id: str) -> int:
        """Prompt tokens that this router has sent there."""
        return self.state.loads.queue_tokens(worker_id, 0, reported_at=0.0)


def prompt_of(tokens: int, home: bytes = b"home") -> PreparedPrompt:
    ids = tuple(range(tokens))
    keys = tuple(block_key(h) for h in hash_chain(root_hash(b"a model"), ids, BLOCK, b""))
    return PreparedPrompt(ids, pack_tokens(ids), keys, home, keyed=False)


@pytest.fixture
async def routing(index_redis: Redis) -> Routing:
    """Two equal, idle workers, w1 and w2, with pools of 1024 tokens."""
    clock = Clock()
    registry = WorkerRegistry(index_redis, KEYS, SPEC, LEASE_S, cooldown_s=5.0, clock=clock)
    for number, worker_id in enumerate(("w1", "w2"), start=1):
        await register(index_redis, record(worker_id, number, address=f"127.0.0.1:{number}", load=LOAD))
    await registry.poll()
    mirror = KvIndexMirror(clock=clock)
    mirror.touch(clock())
    state = RoutingState(registry, mirror, PredictedBlocks(ttl_s=30.0), LoadTracker())
    return Routing(Placer(state, KvAwarePolicy(), BLOCK, STALE_AFTER_S, clock), state, mirror, clock)


@pytest.mark.parametrize("holder", ["w1", "w2"])
async def test_a_request_goes_where_its_prefix_is(routing: Routing, holder: str) -> None:
    prompt = prompt_of(100)
    routing.mirror.replace(holder, prompt.keys[:4])
    placement = routing.place(prompt)
    assert (placement.worker_id, placement.decision.reason) == (holder, RouteReason.PREFIX)
    assert (placement.address, placement.epoch) == (f"127.0.0.1:{holder[1]}", int(holder[1]))
    assert placement.reachable_tokens == 4 * BLOCK
    matched = {cost.worker_id: cost.matched_blocks for cost in placement.decision.costs}
    assert matched == {"w1": 0, "w2": 0} | {holder: 4}


async def test_the_choice_reserves_its_uncached_tokens_at_once(routing: Routing) -> None:
    prompt = prompt_of(100)
    routing.mirror.replace("w2", prompt.keys[:4])
    routing.place(prompt)
    assert (routing.queued("w1"), routing.queued("w2")) == (0, 100 - 4 * BLOCK)
    assert (routing.state.loads.in_flight("w1"), routing.state.loads.in_flight("w2")) == (0, 1)


async def test_a_wholly_cached_prompt_still_counts_as_one_token(routing: Routing) -> None:
    """The last one is always computed."""
    prompt = prompt_of(6 * BLOCK)
    routing.mirror.replace("w2", prompt.keys)
    routing.place(prompt)
    assert routing.queued("w2") == 1


async def test_a_request_that_is_placed_again_is_counted_once(routing: Routing) -> None:
    first = routing.place(prompt_of(100))
    second = routing.place(prompt_of(100), avoid={first.worker_id})
    assert {first.worker_id, second.worker_id} == {"w1", "w2"}
    assert (routing.queued(first.worker_id), routing.queued(second.worker_id)) == (0, 100)


async def test_the_blocks_that_will_be_created_are_predicted(routing: Routing) -> None:
    """Only those beyond what is held; an equal prompt follows, and matches nothing that is confirmed."""
    prompt = prompt_of(100)
    routing.mirror.replace("w1", prompt.keys[:2])
    routing.place(prompt, "first")
    assert len(routing.state.predicted) == len(prompt.keys) - 2 == 4
    second = routing.place(prompt, "second")
    assert (second.worker_id, second.reachable_tokens) == ("w1", 2 * BLOCK)
    cost = {cost.worker_id: cost for cost in second.decision.costs}
    assert (cost["w1"].matched_blocks, cost["w1"].expected_blocks) == (2, 6)
    assert (cost["w2"].matched_blocks, cost["w2"].expected_blocks) == (0, 0)
    assert routing.queued("w1") == (100 - 2 * BLOCK) + (100 - 6 * BLOCK)
    routing.clock.now += 30.0
    routing.mirror.touch(routing.clock())
    third = routing.place(prompt, "third")
    assert max(cost.expected_blocks for cost in third.decision.costs) == 2, "unconfirmed for too long"


async def test_workers_to_avoid_are_not_asked_whatever_they_hold(routing: Routing) -> None:
    prompt = prompt_of(100)
    routing.mirror.replace("w1", prompt.keys)
    placement = routing.place(prompt, avoid={"w1"})
    assert (placement.worker_id, placement.decision.reason) == ("w2", RouteReason.ONLY)
    with pytest.raises(Unavailable, match="no worker is serving now"):
        routing.place(prompt, "other", avoid={"w1", "w2"})
    assert routing.state.loads.in_flight("w1") == 0 and routing.queued("w2") == 100


async def test_a_worker_that_cools_down_is_not_asked(routing: Routing) -> None:
    prompt = prompt_of(100)
    routing.mirror.replace("w1", prompt.keys)
    routing.state.registry.report_failure("w1", epoch=1)
    assert routing.place(prompt).worker_id == "w2"
    routing.state.registry.report_failure("w2", epoch=2)
    placement = routing.place(prompt)
    assert placement.worker_id == "w1", "nobody else is left: better than a refusal"
    assert not placement.decision.excluded
    with pytest.raises(Unavailable):
        routing.placer.weigh(prompt, 16, avoid=("w1", "w2"))


async def test_a_pool_that_nobody_has_told_of_yet_is_no_reason_to_refuse_for_good(
    routing: Routing, index_redis: Redis
) -> None:
    """As INVALID_ARGUMENT a client would believe that its prompt is too long, and not come back."""
    for number, worker_id in enumerate(("w1", "w2"), start=11):
        await register(index_redis, record(worker_id, number, load=LoadReport()))
    await routing.state.registry.poll()
    with pytest.raises(Unavailable, match="no worker has said yet how much its pool holds"):
        routing.place(prompt_of(100))


async def test_an_index_that_is_too_old_is_no_advice(routing: Routing) -> None:
    prompt = prompt_of(100)
    routing.mirror.replace("w1", prompt.keys[:4])
    routing.clock.now += STALE_AFTER_S
    assert routing.place(prompt, "in time").reachable_tokens == 4 * BLOCK
    routing.state.predicted.drop("w1")
    routing.clock.now += 0.001
    placement = routing.place(prompt, "too late")
    assert placement.reachable_tokens == 0
    assert [cost.matched_blocks for cost in placement.decision.costs] == [0, 0]
    assert placement.decision.reason is not RouteReason.PREFIX


async def test_what_no_pool_could_ever_hold_is_the_callers_error(routing: Routing) -> None:
    """Exactly full is possible; one more names what is needed and what there is, and leaves no trace."""
    with pytest.raises(InvalidRequest) as error:
        routing.place(prompt_of(1000), max_tokens=25)
    assert str(error.value) == (
        "max_tokens: prompt (1000 tokens) and max_tokens (25) need 1025 tokens of KV, "
        "the largest pool holds 1024"
    )
    assert routing.queued("w1") == routing.queued("w2") == len(routing.state.predicted) == 0
    assert routing.place(prompt_of(1000), max_tokens=24).worker_id in ("w1", "w2")


async def test_a_worker_whose_pool_is_too_small_is_excluded_and_the_decision_says_so(
    routing: Routing, index_redis: Redis
) -> None:
    prompt, small = prompt_of(100), dataclasses.replace(LOAD, blocks_total=6, blocks_free=6)
    routing.mirror.replace("w1", prompt.keys[:4])
    await register(index_redis, record("w1", 1, address="127.0.0.1:1", load=small))
    await routing.state.registry.poll()
    placement = routing.place(prompt)
    assert (placement.worker_id, placement.decision.reason) == ("w2", RouteReason.ONLY)
    assert placement.decision.excluded == {"w1": "its pool cannot hold 108 tokens"}


async def test_what_fits_a_worker_that_is_only_lost_or_full_now_is_not_the_callers_error(
    routing: Routing, index_redis: Redis
) -> None:
    small = dataclasses.replace(LOAD, blocks_total=6, blocks_free=6)
    await register(index_redis, record("w1", 1, address="127.0.0.1:1", load=small))
    await routing.state.registry.poll()
    with pytest.raises(NobodyServes, match="108 tokens fit only workers that were lost or are full"):
        routing.place(prompt_of(100), avoid={"w2"})


class Stubborn:
    """A user's policy, which answers what it was told to."""

    def __init__(self, answer: Decision | None) -> None:
        self.answer = answer

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        return self.answer


async def test_a_policy_that_compares_otherwise_still_leaves_the_whole_comparison(routing: Routing) -> None:
    decision = Decision("w2", RouteReason.POLICY)
    placer = Placer(routing.state, Stubborn(decision), BLOCK, STALE_AFTER_S, routing.clock)
    placement = placer.place("r", prompt_of(100), 8)
    assert placement.decision.reason is RouteReason.POLICY
    assert [cost.worker_id for cost in placement.decision.costs] == ["w1", "w2"]
    assert routing.queued("w2") == 100


@pytest.mark.parametrize(
    ("answer", "error"), [(None, Unavailable), (Decision("w9", RouteReason.POLICY), ConfigError)]
)
async def test_a_policy_that_chooses_nobody_there_is_refused_and_leaves_no_trace(
    routing: Routing, answer: Decision | None, error: type[Exception]
) -> None:
    placer = Placer(routing.state, Stubborn(answer), BLOCK, STALE_AFTER_S, routing.clock)
    with pytest.raises(error):
        placer.place("r", prompt_of(100), 8)
    assert routing.queued("w1") == routing.queued("w2") == len(routing.state.predicted) == 0
