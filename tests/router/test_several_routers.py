"""Many requests and several routers: they agree, bursts meet or spread, and nobody is left without work."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from placing_rig import PlacedFleet, cold_prompt

from kvhive.router.routing_policy import RouteReason

SIZES = (200, 1000, 4000)


def test_ten_routers_agree_on_where_cold_requests_go() -> None:
    """Any of them gets a request, all of them are asked: reports and rendezvous make them one mind."""
    fleet, rng, agreeing = PlacedFleet(workers=8, routers=10), random.Random(1), 0
    for i in range(1000):
        prompt = cold_prompt(i, rng.choice(SIZES))
        answers = Counter(placer.weigh(prompt, 16).worker_id for placer in fleet.placers)
        agreeing += answers.most_common(1)[0][1]
        fleet.send(prompt, router=rng.randrange(10))
        fleet.complete()
        fleet.clock.now += 0.05
        if i % 10 == 0:
            fleet.report()
    assert agreeing >= 0.99 * 10 * 1000


def test_a_router_that_starts_late_sends_keys_where_the_others_do() -> None:
    """Nothing about a cache_key's home is learnt, so nothing is lost with a router."""
    fleet = PlacedFleet(workers=8, routers=2)
    for i in range(300):
        prompt = cold_prompt(i, key=f"user {i}")
        first = fleet.send(prompt, router=0).worker_id
        assert fleet.placers[1].weigh(prompt, 16).worker_id == first
        fleet.complete()
        fleet.report()


def test_a_burst_seen_by_one_router_is_load_for_the_other_after_the_next_report() -> None:
    fleet = PlacedFleet(workers=4, routers=2)
    home = fleet.send(cold_prompt(0, 8000, key="k"), router=0).worker_id
    for i in range(1, 6):
        fleet.send(cold_prompt(i, 8000, key="k"), router=0)
    assert fleet.placers[1].weigh(cold_prompt(9, key="k"), 16).worker_id == home, "it cannot know yet"
    fleet.clock.now += 1.0
    fleet.report()
    answer = fleet.placers[1].weigh(cold_prompt(9, key="k"), 16)
    assert answer.worker_id != home and answer.decision.reason is RouteReason.LOAD


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("tokens", [500, 2000, 20_000])
def test_a_burst_of_equal_cold_prompts_computes_the_prefix_at_most_twice(workers: int, tokens: int) -> None:
    """64 at once, before any worker has said anything."""
    fleet, prompt = PlacedFleet(workers), cold_prompt(1, tokens)
    placements = [fleet.send(prompt) for _ in range(64)]
    computed = [p for p in placements if p.expected_blocks < len(prompt.keys)]
    assert 1 <= len(computed) <= 2


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("shared_blocks", [0, 1])
def test_a_burst_of_different_cold_prompts_spreads_evenly(workers: int, shared_blocks: int) -> None:
    for seed in range(5):
        fleet, rng = PlacedFleet(workers), random.Random(seed)
        prompts = [cold_prompt(rng.randrange(10**9), 1000, shared_blocks=shared_blocks) for _ in range(64)]
        counts = Counter(fleet.send(prompt).worker_id for prompt in prompts)
        assert max(counts.values()) <= 1.3 * 64 / workers and len(counts) == workers


@pytest.mark.parametrize("gap_s", [0.0, 0.02, 2.0])
def test_a_cold_start_with_a_common_first_block_leaves_nobody_without_work(gap_s: float) -> None:
    """However much time there is between requests: the block that all share draws them to no one worker."""
    fleet, rng, counts = PlacedFleet(workers=8), random.Random(2), Counter[str]()
    for i in range(400):
        counts[fleet.send(cold_prompt(i, rng.choice(SIZES), shared_blocks=1)).worker_id] += 1
        fleet.clock.now += gap_s
        if i % 5 == 0:
            fleet.complete()
            fleet.report()
    assert len(counts) == 8 and min(counts.values()) >= 0.05 * 400


def test_a_worker_that_joins_gets_new_prompts_and_the_old_ones_stay_where_they_are() -> None:
    fleet = PlacedFleet(workers=1)
    old = [cold_prompt(i) for i in range(10)]
    for prompt in old:
        fleet.send(prompt)
        fleet.complete()
    fleet.report()
    fleet.join("w9")
    counts = Counter[str]()
    for i in range(10):
        counts[fleet.send(cold_prompt(100 + i)).worker_id] += 1
        fleet.complete()
        assert fleet.send(old[i]).worker_id == "w0"
        fleet.complete()
        fleet.clock.now += 1.0
        fleet.report()
    assert counts["w9"] >= 4


def test_a_hot_prefix_gets_a_second_place_under_load_and_loses_it_afterwards() -> None:
    """A replica, which nothing keeps: without load one worker gets all, and the other copy grows old."""
    fleet = PlacedFleet(workers=2)
    hot = cold_prompt(1, 4000)
    fleet.send(hot)
    fleet.complete()
    fleet.report()
    holder = fleet.send(hot).worker_id
    fleet.complete()
    for i in range(4):
        fleet.send(cold_prompt(10 + i, 20_000, key="elsewhere busy"))
    (other,) = set(fleet.running) - {holder}
    fleet.running[holder] += fleet.running.pop(other)  # until its queue costs more than computing it again
    fleet.running[other] = []
    fleet.report()
    fleet.states[0].loads.__init__()  # type: ignore[misc]
    replica = fleet.send(hot)
    assert replica.worker_id != holder and replica.decision.reason is RouteReason.REPLICA
    fleet.complete()
    fleet.clock.now += 1.0
    fleet.report()
    after = Counter[str]()
    for _ in range(20):
        placement = fleet.send(hot)
        assert placement.decision.reason is RouteReason.PREFIX
        after[placement.worker_id] += 1
        fleet.complete()
        fleet.report()
    assert len(after) == 1
