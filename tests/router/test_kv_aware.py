"""The decision: one cost in seconds, ties go home, and the whole comparison is kept."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.routing_cost import FULL_POOL_STEPS
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest, Speed

SPEED = Speed(step_base_s=0.01, per_token_s=0.001, per_attention_s=0.0, max_step_tokens=512)
IDLE = Candidate(
    worker_id="w1",
    matched_blocks=0,
    expected_blocks=0,
    queue_tokens=0,
    decoding=0,
    speed=SPEED,
    victim_reuse=0.0,
    free_tokens=0,
    capacity_tokens=10_000,
    recent_cold_tokens=0.0,
)


def worker(worker_id: str, **changes: object) -> Candidate:
    matched = changes.get("matched_blocks", 0)
    return replace(IDLE, worker_id=worker_id, **{"expected_blocks": matched, **changes})  # type: ignore[arg-type]


def request(prompt_tokens: int = 640, home: bytes = b"home", keyed: bool = False) -> RouteRequest:
    return RouteRequest(prompt_tokens, 16, 16, home, keyed)


def decide(*candidates: Candidate, **kwargs: object) -> Decision:
    decision = KvAwarePolicy().decide(request(**kwargs), candidates)  # type: ignore[arg-type]
    assert decision is not None
    return decision


def test_an_idle_holder_of_the_prefix_wins() -> None:
    decision = decide(worker("w1"), worker("w2", matched_blocks=32))
    assert (decision.worker_id, decision.reason) == ("w2", RouteReason.PREFIX)


def test_blocks_on_their_way_count_like_blocks_that_are_there() -> None:
    decision = decide(worker("w1"), worker("w2", expected_blocks=32))
    assert (decision.worker_id, decision.reason) == ("w2", RouteReason.PREFIX)


def test_a_queue_longer_than_the_priced_prefill_sends_the_request_away() -> None:
    """A hot prefix gets a second home when its first costs more."""
    busy = worker("w2", matched_blocks=32, queue_tokens=5000)
    decision = decide(worker("w1"), busy)
    assert (decision.worker_id, decision.reason) == ("w1", RouteReason.REPLICA)
    assert decide(worker("w1"), replace(busy, queue_tokens=300)).worker_id == "w2"


def price(**changes: object) -> float:
    return decide(worker("w", **changes)).costs[0].price


def test_the_price_of_computing_rises_with_the_load_of_the_fleet() -> None:
    """Half of the time spent computing: a second more of it costs everybody two. A step's base counts."""
    per_token_s = SPEED.per_token_s + SPEED.step_base_s / SPEED.max_step_tokens
    assert price() == 1.0
    assert price(cold_tokens_per_s=0.5 / per_token_s) == pytest.approx(2.0)
    assert price(cold_tokens_per_s=100 / per_token_s) == pytest.approx(6.0), "no further"
    busy, idle = worker("w1", cold_tokens_per_s=0.8 / per_token_s), worker("w2")
    assert [cost.price for cost in decide(busy, idle).costs] == pytest.approx([1 / 0.6, 1 / 0.6])


def test_the_price_of_computing_rises_where_it_evicts_what_is_used_again() -> None:
    """What is computed again evicts again: of a half, then of a quarter, in all twice as much."""
    assert price(victim_reuse=0.5) == pytest.approx(2.0)
    assert price(victim_reuse=1.0) == pytest.approx(6.0), "no further"
    assert price(victim_reuse=0.5, free_tokens=656) == 1.0, "nothing is evicted where unused blocks suffice"
    assert price(victim_reuse=0.5, free_tokens=655) == pytest.approx(2.0)
    often, never = worker("w1", victim_reuse=0.8), worker("w2")
    assert [cost.price for cost in decide(often, never).costs] == pytest.approx([1 / 0.6, 1 / 0.6])


def test_what_another_worker_is_just_computing_is_not_computed_twice_for_its_own_price() -> None:
    """Half of the prompt is on its way into w2, and as good as there in w3."""
    costs = decide(worker("w1"), worker("w2", expected_blocks=20), worker("w3", matched_blocks=20)).costs
    assert [cost.price for cost in costs] == pytest.approx([1.5, 1.0, 1.0])


def test_a_cold_prompt_avoids_the_busy_worker_whatever_its_cache_holds() -> None:
    """Least loaded, not smallest cache."""
    for home in (b"a", b"b", b"c", b"d"):
        decision = decide(worker("w1", queue_tokens=3000, decoding=4), worker("w2"), home=home)
        assert decision.worker_id == "w2"


def test_a_fully_cached_prompt_still_pays_for_its_last_token() -> None:
    decision = decide(worker("w1", matched_blocks=40))
    assert decision.costs[0].compute_s == pytest.approx(SPEED.prefill_s(1, 639))


def test_equal_cold_prompts_meet_on_one_worker_and_unrelated_ones_spread() -> None:
    workers = [worker(f"w{i}") for i in range(4)]
    rng = random.Random(1)
    homes = Counter(decide(*workers, home=rng.randbytes(16)).worker_id for _ in range(400))
    assert min(homes.values()) > 60
    assert len({decide(*workers, home=b"same").worker_id for _ in range(10)}) == 1


def test_the_order_of_candidates_does_not_matter() -> None:
    workers = [worker(f"w{i}", matched_blocks=i % 2 * 8) for i in range(6)]
    rng, first = random.Random(2), decide(*[worker(f"w{i}", matched_blocks=i % 2 * 8) for i in range(6)])
    for _ in range(20):
        rng.shuffle(workers)
        assert decide(*workers).worker_id == first.worker_id


def test_membership_changes_move_only_the_keys_of_the_worker_that_left() -> None:
    """Rendezvous hashing: every other home stays where it was."""
    workers = [worker(f"w{i}") for i in range(3)]
    keys = [f"key{i}".encode() for i in range(60)]
    before = {key: decide(*workers, home=key, keyed=True).worker_id for key in keys}
    without = {key: decide(*workers[:2], home=key, keyed=True).worker_id for key in keys}
    assert all(without[key] == home for key, home in before.items() if home != "w2")
    assert {key: decide(*workers, home=key, keyed=True).worker_id for key in keys} == before


def test_a_home_with_more_than_its_share_of_cold_work_passes_a_newcomer_on() -> None:
    home = decide(worker("w1"), worker("w2")).worker_id
    loaded = [worker(w, recent_cold_tokens=2000.0 if w == home else 0.0) for w in ("w1", "w2")]
    decision = decide(*loaded)
    assert decision.worker_id != home and decision.reason is RouteReason.BALANCE
    assert decide(*loaded, keyed=True).worker_id == home, "a cache_key stays at home"


def test_groups_of_cold_prompts_give_every_worker_work() -> None:
    """Four prefixes on two workers are never all at home on one of them."""
    for seed in range(50):
        rng, recent = random.Random(seed), {"w1": 0.0, "w2": 0.0}
        for _ in range(4):
            workers = [worker(w, recent_cold_tokens=tokens) for w, tokens in recent.items()]
            recent[decide(*workers, home=rng.randbytes(16)).worker_id] += 640.0
        assert min(recent.values()) >= 640.0


def test_nobody_is_chosen_of_nobody() -> None:
    assert KvAwarePolicy().decide(request(), []) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 20_000), st.integers(0, 64), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    ),
    st.binary(max_size=8),
)
def test_the_choice_is_never_much_worse_than_the_best(
    rows: list[tuple[int, int, int, float]], home: bytes
) -> None:
    """At most 1 % or 2 ms above the cheapest, and every candidate is in the comparison."""
    workers = [
        worker(f"w{i}", matched_blocks=m, queue_tokens=q, decoding=d, victim_reuse=reuse)
        for i, (m, q, d, reuse) in enumerate(rows)
    ]
    decision = decide(*workers, home=home)
    costs = {cost.worker_id: cost.cost_s for cost in decision.costs}
    assert len(costs) == len(rows)
    best = min(costs.values())
    assert costs[decision.worker_id] <= best + max(0.002, 0.01 * best) + 1e-9


FULL = worker("w1", live_tokens=9_500, decoding=4, release_tokens=500.0, capacity_tokens=10_000)
"""A step of its four sequences takes 14 ms, so each is expected to hold its blocks for 7 s more."""


def room_s(candidate: Candidate) -> float:
    nearly_s = FULL_POOL_STEPS * SPEED.step_base_s * candidate.live_tokens / candidate.capacity_tokens
    return decide(candidate).costs[0].room_s - nearly_s


def test_a_pool_full_of_what_others_use_costs_the_wait_for_one_of_them() -> None:
    """Cached blocks make room at once, live ones do not: four running sequences end every 1.75 s."""
    assert room_s(FULL) == pytest.approx(7.0 / 4)
    assert room_s(replace(FULL, live_tokens=9_360)) == pytest.approx(0.0), "just enough"
    assert decide(FULL, worker("w2", decoding=4)).worker_id == "w2"


def test_what_is_cached_takes_room_unless_it_is_known_to_be_in_use() -> None:
    """A long answer runs beside the cached prompt: the prompt's blocks become live again, all of them."""
    held = replace(FULL, matched_blocks=38, expected_blocks=38)
    assert room_s(held) == pytest.approx(7.0 / 4)
    assert room_s(replace(held, shared_tokens=608)) == pytest.approx(0.0)


def test_sequences_are_taken_to_grow_half_of_what_they_are_expected_to() -> None:
    enough = replace(FULL, live_tokens=9_000)
    assert room_s(enough) == pytest.approx(0.0)
    assert room_s(replace(enough, growth_tokens=720.0)) == pytest.approx(0.0)
    assert room_s(replace(enough, growth_tokens=721.0)) == pytest.approx(7.0 / 4)
    assert room_s(replace(enough, growth_tokens=705.0, answer_tokens=16.0)) == pytest.approx(7.0 / 4), (
        "its own"
    )
    assert room_s(replace(enough, growth_tokens=704.0, answer_tokens=1e6)) == pytest.approx(0.0), "max_tokens"


def test_of_two_pools_with_room_the_emptier_one_is_a_little_cheaper() -> None:
    costs = decide(worker("w1", live_tokens=5_000), worker("w2")).costs
    assert (costs[0].room_s, costs[1].room_s) == pytest.approx((FULL_POOL_STEPS * 0.005, 0.0))


def test_a_match_of_less_than_an_eighth_decides_no_tie() -> None:
    """Nor does it make a copy elsewhere a replica."""
    for home in (b"a", b"b", b"c", b"d", b"e", b"f"):
        plain = decide(worker("w1"), worker("w2"), home=home)
        assert decide(worker("w1"), worker("w2", matched_blocks=5), home=home).worker_id == plain.worker_id
        assert decide(worker("w1"), worker("w2", matched_blocks=6), home=home).worker_id == "w2"
    busy = worker("w2", matched_blocks=5, queue_tokens=5000)
    assert decide(worker("w1"), busy).reason in (RouteReason.HOME, RouteReason.LOAD)


def test_a_small_lead_in_the_match_is_no_replica() -> None:
    longer = worker("w2", matched_blocks=33, queue_tokens=3000)
    decision = decide(worker("w1", matched_blocks=30), longer)
    assert (decision.worker_id, decision.reason) == ("w1", RouteReason.PREFIX)
