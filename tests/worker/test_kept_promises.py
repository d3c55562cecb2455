"""What a pin promises, on a real scheduler, pool and engine: floods, tenants, refusals, room for others."""

from __future__ import annotations

import random
from typing import cast

import pytest
from engine_rig import Rig

from kvhive.proto.errors import Overloaded
from kvhive.worker.kept_out import MAX_KEPT_OUT_S, KeptOut
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.pins import PinBudget
from kvhive.worker.sequence import SequenceState

BLOCKS, BLOCK = 256, 16
POOL = BLOCKS * BLOCK
PREFIX = 1000
FULL = PREFIX // BLOCK * BLOCK
TTL_S = 300.0


@pytest.fixture
def rig() -> Rig:
    return Rig(BLOCKS, BLOCK, budget=512)


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(900), k=length)


def flood(rig: Rig, tokens: int, seed: int = 1000) -> None:
    """So many tokens of prompts that nobody asks for again; every one of them is answered."""
    length = 480
    for number in range(-(-tokens // length)):
        name = f"flood{seed}-{number}-{rig.now}"
        rig.submit(name, text(seed + number, length), max_tokens=1)
        rig.run()
        assert len(rig.tokens(name)) == 1


def hit(rig: Rig, name: str, prompt: list[int]) -> int:
    rig.submit(name, [*prompt, 1], max_tokens=1)
    rig.run()
    return rig.cached(name)


def test_a_pinned_prefix_survives_twenty_pools_of_others_for_its_time_and_is_evictable_after_it(
    rig: Rig,
) -> None:
    """To the token, on both sides of its end; one that is not pinned is gone after the first pool."""
    pinned, plain = text(1, PREFIX), text(2, PREFIX)
    rig.submit("plain", plain, max_tokens=1)
    rig.submit("pinned", pinned, max_tokens=1, pins=[(PREFIX, TTL_S)])
    rig.run()
    ends_at = rig.now + TTL_S
    assert rig.outputs["pinned"][0].pinned_tokens == FULL and rig.outputs["pinned"][0].pins_refused == ""
    flood(rig, 20 * POOL)
    assert rig.now < ends_at and rig.pool.usage().pinned == FULL // BLOCK
    rig.now = ends_at - 0.1
    assert hit(rig, "plain again", plain) == 0
    assert hit(rig, "in time", pinned) == FULL
    renewed_until = rig.now + TTL_S  # by a request that asked for nothing
    rig.now = ends_at + 100.0
    flood(rig, POOL, seed=5000)
    assert rig.pool.usage().pinned == FULL // BLOCK
    rig.now = renewed_until + 0.1
    flood(rig, POOL, seed=9000)
    assert rig.pool.usage().pinned == rig.pool.leases.total == 0
    assert hit(rig, "too late", pinned) == 0


def test_pins_past_a_budget_are_refused_whole_told_at_once_and_hold_nothing(rig: Rig) -> None:
    """A quarter of the pool each, half of it in all: 64 and 128 blocks."""
    told = {}
    for number, tenant in enumerate("aabc"):
        name = f"{tenant}{number}"
        rig.submit(name, text(number, 980), max_tokens=3, pins=[(960, TTL_S)], tenant=tenant)
        rig.run()
        output = rig.outputs[name][0]
        assert len(rig.tokens(name)) == 3, "the request is answered whatever becomes of its pin"
        told[name] = output.pinned_tokens, str(output.pins_refused)
    assert told == {
        "a0": (960, ""),
        "a1": (0, "over_tenant_budget"),
        "b2": (960, ""),
        "c3": (0, "over_budget"),
    }
    assert [rig.pool.leases.held_by(tenant) for tenant in "abc"] == [60, 60, 0]


def test_of_several_breakpoints_the_longest_that_fits_is_kept(rig: Rig) -> None:
    """And what is kept is kept for as long as it was asked for, not as long as what was refused."""
    pins = [(160, 10.0), (640, TTL_S), (1600, 2 * TTL_S)]
    rig.submit("a", text(1, 1700), max_tokens=1, pins=pins)
    rig.run()
    assert rig.outputs["a"][0].pinned_tokens == 640
    assert rig.outputs["a"][0].pins_refused == "over_tenant_budget"
    assert {block.lease.ttl_s for block in rig.pool.blocks if block.lease} == {TTL_S}
    rig.now += TTL_S + 1.0
    rig.pool.expire(rig.now)
    assert rig.pool.leases.total == 0


def test_a_tenant_that_shares_a_pinned_prefix_pays_nothing_for_it(rig: Rig) -> None:
    """Blocks count once: who asks for as long as they are kept already needs no budget."""
    prompt = text(1, 970)
    for number, tenant in enumerate("abcdef"):
        rig.submit(tenant, prompt, max_tokens=1, pins=[(960, TTL_S - number)], tenant=tenant)
        rig.run()
        assert rig.outputs[tenant][0].pinned_tokens == 960
    assert [rig.pool.leases.held_by(tenant) for tenant in "abf"] == [60, 0, 0]


def fill_budget(rig: Rig, ttl_s: float) -> None:
    for number, tenant in enumerate("wxyz"):
        rig.submit(tenant, text(number, 520), max_tokens=1, pins=[(512, ttl_s)], tenant=tenant)
    rig.run()
    assert rig.pool.leases.total == BLOCKS // 2


def test_a_pool_whose_pin_budget_is_full_serves_what_fits_beside_it(rig: Rig) -> None:
    """Many at once, with answers that make them preempt each other: all end, and no pin is lost."""
    fill_budget(rig, 10 * TTL_S)
    for number in range(8):
        rig.submit(f"r{number}", text(100 + number, 300), max_tokens=100)
    rig.run()
    assert all(len(rig.tokens(f"r{number}")) == 100 for number in range(8))
    assert rig.scheduler.preemptions
    assert rig.pool.usage().pinned == BLOCKS // 2


def test_who_fits_only_without_pins_is_refused_after_a_minute_and_leases_are_renewed_again(rig: Rig) -> None:
    """Meanwhile others are served, and are told that no pin begins."""
    fill_budget(rig, 10 * TTL_S)
    large = rig.submit("large", text(50, POOL // 2 + 100), max_tokens=1)
    began = rig.now
    while not rig.outputs.get("large") and rig.now < began + 2 * MAX_KEPT_OUT_S:
        name = f"small{rig.now}"
        rig.submit(name, text(0, 512), max_tokens=1, pins=[(500, 20 * TTL_S)])
        rig.run(steps=2)
        assert len(rig.tokens(name)) == 1
        assert rig.outputs[name][0].pins_refused == "making_room" or "large" in rig.outputs
        rig.now += 1.0
    error = rig.outputs["large"][0].error
    assert isinstance(error, Overloaded) and "no room for 2148 tokens within 60 s" in str(error)
    assert MAX_KEPT_OUT_S <= rig.now - began < MAX_KEPT_OUT_S + 5.0
    assert large.state is SequenceState.FINISHED
    rig.submit("after", text(0, 512), max_tokens=1, pins=[(500, 20 * TTL_S)], tenant="w")
    rig.run()
    assert rig.outputs["after"][0].pinned_tokens == 496


def test_who_sends_large_prompts_all_the_time_ends_no_lease_that_is_in_use(rig: Rig) -> None:
    """Cancelled in time or not: room is made for a minute, and then leases are renewed for ten."""
    prompt = text(0, 513)
    rig.submit("pinned", prompt, max_tokens=1, pins=[(512, TTL_S)])
    for number, tenant in enumerate("xyz"):
        rig.submit(tenant, text(1 + number, 520), max_tokens=1, pins=[(512, 20 * TTL_S)], tenant=tenant)
    rig.run()
    told = []
    for minute in range(25):
        rig.submit(f"large{minute}", text(50, POOL // 2 + 100), max_tokens=1)
        for part in range(3):
            rig.submit(f"{minute}.{part}", prompt, max_tokens=1, pins=[(512, TTL_S)])
            rig.run(steps=3)
            assert rig.cached(f"{minute}.{part}") == 512
            told.append(str(rig.outputs[f"{minute}.{part}"][0].pins_refused))
            rig.now += 19.0
        rig.engine.cancel(f"large{minute}")
    assert told.count("making_room") in range(3, 12) and set(told) == {"", "making_room"}


def preempted(max_tokens: int) -> Rig:
    """A long answer that had to go for a short one, which leaves 5 of 16 blocks pinned for long."""
    rig = Rig(16, 4, pins=PinBudget(0.5, 0.5))
    rig.submit("long", range(20), max_tokens=max_tokens)
    rig.run(steps=8)
    rig.submit("pinning", range(100, 121), max_tokens=12, pins=[(20, 1000.0)], priority=1)
    rig.run()
    assert rig.outputs["pinning"][0].pinned_tokens == 20
    return rig


def test_who_is_preempted_comes_back_as_soon_as_all_but_pins_is_free_and_goes_on_as_far_as_that_is() -> None:
    """An answer without a bound of its own has the whole pool's, and must not wait for that."""
    rig = preempted(max_tokens=24)
    assert len(rig.tokens("long")) == 24 and rig.sequences["long"].preemptions == 1 and rig.now < 2.0
    rig = preempted(max_tokens=44)  # all 16 blocks in the end, where 11 are left
    last = rig.outputs["long"][-1]
    assert isinstance(last.error, Overloaded) and rig.sequences["long"].preemptions == 2
    assert len(rig.tokens("long")) == 25, "its router takes it elsewhere with these"
    assert MAX_KEPT_OUT_S < rig.now < MAX_KEPT_OUT_S + 10.0


class PinsInTheWay:
    """A cache manager of which only that is asked, with a clock."""

    def __init__(self) -> None:
        self.now, self.pins = 0.0, True

    def clock(self) -> float:
        return self.now

    def kept_out_by_pins(self, seq: object, num_tokens: int) -> bool:
        return self.pins


def test_who_waits_for_others_than_pins_meanwhile_is_not_kept_out_by_pins() -> None:
    """No room is made for it then, and its minute begins anew when pins are in its way again."""
    manager, seq = PinsInTheWay(), Rig(16, 4).submit("r", range(8))
    kept_out = KeptOut(cast(KvCacheManager, manager))
    assert kept_out.note(seq, 9) and kept_out.makes_room()
    manager.now, manager.pins = 10.0, False
    assert not kept_out.note(seq, 9) and not kept_out and not kept_out.makes_room()
    manager.now, manager.pins = MAX_KEPT_OUT_S + 5.0, True
    assert kept_out.note(seq, 9) and kept_out.overdue() == []
    manager.now += MAX_KEPT_OUT_S
    assert kept_out.overdue() == [seq]
