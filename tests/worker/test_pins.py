"""Pins: what a lease keeps, how long, on whose budget, and that it never makes the pool unusable."""

from __future__ import annotations

import threading
import time

import pytest
from engine_rig import Rig
from leased_chains import LeasedChains

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.hot_chains import HotBounds, hot_chains
from kvhive.worker.pins import PinBudget
from kvhive.worker.sequence import SequenceState


def chain(pool: BlockPool, name: str, length: int) -> list[Block]:
    """Compute a chain and hold it."""
    blocks = pool.allocate(length)
    for i, block in enumerate(blocks):
        pool.register(block, BlockHash(f"{name}{i}".encode().ljust(32, b".")))
    return blocks


def release(pool: BlockPool, blocks: list[Block], now: float) -> None:
    for block in reversed(blocks):
        pool.release(block, now)


def pin(pool: BlockPool, blocks: list[Block], ttl_s: float, tenant: str = "t", now: float = 0.0) -> str:
    """Pin a chain; return why not, or nothing."""
    return pool.pin(blocks, [ttl_s] * len(blocks), tenant, now) or ""


def cached_names(pool: BlockPool) -> set[str]:
    return {block_hash.decode().strip(".") for block_hash in pool._by_hash}


def test_a_pinned_block_is_evicted_only_after_its_lease() -> None:
    """It counts as cached, is not available, and comes back as a victim when the lease ends."""
    pool = BlockPool(8)
    blocks = chain(pool, "a", 2)
    assert pin(pool, blocks, ttl_s=10.0) == ""
    release(pool, blocks, now=5.0)
    assert (pool.usage().cached, pool.usage().pinned, pool.available) == (2, 2, 6)
    pool.expire(now=14.9)
    assert pool.available == 6
    pool.expire(now=15.0)
    assert (pool.usage().cached, pool.usage().pinned, pool.available) == (2, 0, 8)
    assert pool.leases.total == 0


def test_every_use_renews_the_lease_and_it_does_not_run_while_the_block_is_live() -> None:
    pool = BlockPool(8)
    blocks = chain(pool, "a", 2)
    pin(pool, blocks, ttl_s=10.0)
    release(pool, blocks, now=0.0)
    for block in blocks:
        pool.acquire(block)
    pool.expire(now=30.0)  # live: nothing ends
    assert pool.leases.total == 2
    release(pool, blocks, now=40.0)
    pool.expire(now=49.0)
    assert pool.usage().pinned == 2
    pool.expire(now=50.0)
    assert pool.usage().pinned == 0


def test_while_room_is_made_what_is_in_use_keeps_its_time_from_then_on_and_nothing_else_is_renewed() -> None:
    pool = BlockPool(16)
    used, idle = chain(pool, "a", 2), chain(pool, "b", 2)
    assert (pin(pool, used, 10.0), pin(pool, idle, 10.0)) == ("", "")
    release(pool, idle, now=95.0)
    pool.leases.renew(False, 100.0)
    pool.leases.renew(False, 101.0)
    assert pin(pool, used, 20.0) == "making_room"
    for block in idle:
        pool.acquire(block)
    release(pool, idle, now=104.0)
    release(pool, used, now=109.0)
    for now, pinned in ((104.9, 4), (105.0, 2), (109.9, 2), (110.0, 0)):
        pool.expire(now)
        assert (now, pool.usage().pinned) == (now, pinned)
    pool.leases.renew(True, 160.0)
    for block in used:
        pool.acquire(block)
    assert pin(pool, used, 10.0, now=160.0) == ""


@pytest.mark.parametrize("ttls", [(10.0, 3.0), (3.0, 10.0), (5.0, 5.0)])
def test_prefixes_stay_closed_however_leases_end(ttls: tuple[float, float]) -> None:
    """A short prefix and the whole chain are pinned for different times; children always go first."""
    pool = BlockPool(16)
    blocks = chain(pool, "a", 4)
    pin(pool, blocks[:2], ttls[0])
    pin(pool, blocks, ttls[1])
    release(pool, blocks, now=0.0)
    other = chain(pool, "x", 12)
    for now in range(0, 14):
        pool.expire(float(now))
        while pool._cached:
            other += pool.allocate(1)
            left = {int(name[1:]) for name in cached_names(pool) if name.startswith("a")}
            assert left == set(range(len(left))), "a block was left without its parent"
    assert not any(name.startswith("a") for name in cached_names(pool))


def test_a_parent_whose_last_user_leaves_after_its_lease_is_evicted_after_its_child() -> None:
    """While room is made both leases end at one moment, and nobody has looked since."""
    pool = BlockPool(8)
    parent, child = blocks = pool.allocate(2)
    pool.register(parent, BlockHash(b"p" * 32))
    pool.register(child, BlockHash(b"c" * 32), parent)
    assert pin(pool, blocks, 10.0, now=90.0) == ""
    pool.acquire(parent)  # by another request, which stays
    pool.leases.renew(False, 100.0)
    release(pool, blocks, now=101.0)
    pool.expire(109.9)
    pool.release(parent, 110.1)
    pool.expire(110.2)
    pool.allocate(7)
    assert (parent.block_hash is not None, child.block_hash) == (True, None)
    assert [len(each.hashes) for each in hot_chains(pool, [], HotBounds(8, 8), 111.0)] == [1]


def test_prefixes_stay_closed_whatever_happens_when() -> None:
    for seed in range(400):
        LeasedChains(seed).walk(60)


def test_pins_are_bounded_per_tenant_and_in_all_and_what_was_refused_is_told() -> None:
    pool = BlockPool(20)
    asked = [("a", 4), ("b", 6), ("b", 5), ("a", 1), ("a", 1), ("c", 1)]
    refusals = [
        pin(pool, chain(pool, f"{name}{i}-", length), 60.0, name) for i, (name, length) in enumerate(asked)
    ]
    assert refusals == ["", "over_tenant_budget", "", "", "over_tenant_budget", "over_budget"]
    assert [pool.leases.held_by(name) for name in "abc"] == [5, 5, 0], "a quarter each, half in all"


def test_a_block_counts_for_the_tenant_that_wants_it_longest() -> None:
    pool = BlockPool(20)
    blocks = chain(pool, "a", 4)
    for tenant, ttl_s, charged in (("a", 5.0, (4, 0)), ("b", 5.0, (4, 0)), ("b", 9.0, (0, 4))):
        assert pin(pool, blocks, ttl_s, tenant) == ""
        assert (pool.leases.held_by("a"), pool.leases.held_by("b")) == charged
    assert pool.leases.total == 4
    assert pin(pool, chain(pool, "b", 1), 1.0, "b") == ""
    others = chain(pool, "c", 2)
    assert pin(pool, others, 5.0, "a") == ""
    assert pin(pool, others, 9.0, "b") == "over_tenant_budget", "it would count for them now"
    assert (pool.leases.held_by("a"), pool.leases.held_by("b")) == (2, 5)


def test_clearing_forgets_pinned_blocks_and_gives_their_budget_back() -> None:
    pool = BlockPool(8)
    for _ in range(3):
        blocks = chain(pool, "a", 2)
        assert pin(pool, blocks, 100.0) == ""
        release(pool, blocks, now=0.0)
        assert pool.clear() == 2
        assert (pool.leases.total, pool.usage().free, len(pool.leases._ends)) == (0, 8, 0)


def test_renewing_does_not_grow_the_heap() -> None:
    pool = BlockPool(8)
    blocks = chain(pool, "a", 2)
    pin(pool, blocks, ttl_s=10.0)
    for now in range(100):
        release(pool, blocks, float(now))
        pool.expire(float(now))
        for block in blocks:
            pool.acquire(block)
    assert len(pool.leases._ends) <= 2


def test_a_share_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="share_in_all: must be at least 0 and below 1, is 1"):
        PinBudget(share_in_all=1.0)


def test_the_full_blocks_before_the_breakpoint_survive_pressure_and_the_rest_does_not() -> None:
    """14 tokens are asked for: 3 full blocks of 4."""
    rig = Rig(blocks=16)
    rig.submit("a", range(20), max_tokens=2, pins=[(14, 60.0)])
    rig.run()
    assert rig.outputs["a"][0].pinned_tokens == 12
    for i in range(5):
        rig.submit(f"other{i}", range(1000 * i + 500, 1000 * i + 540), max_tokens=2)
        rig.run()
    again = rig.submit("again", range(20), max_tokens=2)
    rig.run()
    assert again.cached_tokens == 12


def test_several_breakpoints_each_last_as_long_as_they_ask() -> None:
    rig = Rig(blocks=16)
    rig.submit("a", range(17), max_tokens=1, pins=[(4, 100.0), (16, 5.0)])
    rig.run()
    assert rig.pool.usage().pinned == 4
    rig.now += 10.0
    rig.pool.expire(rig.now)
    assert rig.pool.usage().pinned == 1


def test_a_pin_changes_neither_tokens_nor_hits() -> None:
    for pins in ([], [(16, 60.0)]):
        rig = Rig(blocks=32)
        for request_id in ("a", "b"):
            rig.submit(request_id, range(18), pins=pins)
            rig.run()
        assert (rig.cached("a"), rig.cached("b")) == (0, 16)
        assert rig.tokens("b") == rig.expected("b", 4)


def test_what_only_pins_keep_out_waits_for_them_and_lets_others_pass() -> None:
    """It waits no longer than the lease, although requests that hit the pinned blocks keep coming."""
    rig = Rig(blocks=16)
    rig.submit("pinning", range(17), max_tokens=1, pins=[(16, 30.0)])
    rig.run()
    large = rig.submit("large", range(100, 158), max_tokens=6)  # 16 blocks, 4 of them are pinned
    for i in range(40):
        small = rig.submit(f"small{i}", range(18), max_tokens=1, pins=[(16, 30.0)])
        rig.run(steps=2)
        if large.num_computed:
            break
        assert small.state is SequenceState.FINISHED and small.cached_tokens == 16
        assert rig.outputs[f"small{i}"][0].pinned_tokens == 0, "no pin is renewed meanwhile, and that is told"
        rig.now += 1.0
    assert 28.0 < rig.now < 33.0
    rig.run()
    assert len(rig.tokens("large")) == 6
    rig.submit("after", range(18), max_tokens=1, pins=[(16, 30.0)])
    rig.run()
    assert rig.outputs["after"][0].pinned_tokens == 16


def test_an_engine_that_waits_for_a_lease_does_not_spin_and_then_goes_on() -> None:
    """Nothing runs and one waits: the loop looks again now and then, and starts it when the lease ends."""
    rig = Rig(blocks=16)
    rig.submit("pinning", range(17), max_tokens=1, pins=[(16, 30.0)])
    rig.run()
    rig.submit("large", range(100, 158), max_tokens=6)
    thread = threading.Thread(target=rig.engine.run)
    before = rig.engine.steps
    thread.start()
    time.sleep(0.5)
    assert rig.engine.steps - before <= 15
    rig.now += 40.0
    deadline = time.monotonic() + 10
    while len(rig.tokens("large")) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    rig.engine.stop()
    thread.join(10)
    assert len(rig.tokens("large")) == 6


def test_a_request_whose_own_prefix_is_pinned_does_not_wait_for_it() -> None:
    rig = Rig(blocks=16)
    rig.submit("pinning", range(17), max_tokens=1, pins=[(16, 1000.0)])
    rig.run()
    large = rig.submit("large", range(58), max_tokens=6)
    rig.run(steps=20)
    assert large.state is SequenceState.FINISHED and large.cached_tokens == 16
