"""The pool's bookkeeping, with exact block ids where order is the promise."""

from __future__ import annotations

import pytest

from kvhive.proto.block_hash import BlockHash, block_key
from kvhive.proto.kv_events import KvEvent, RemovalCause
from kvhive.worker.block_pool import Block, BlockPool, PoolUsage


def h(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def cached_chain(pool: BlockPool, *names: str, now: float = 0.0) -> list[Block]:
    """Compute and finish a chain: its blocks end up cached."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.register(block, h(name)) is block
    for block in reversed(blocks):
        pool.release(block, now)
    return blocks


def test_fresh_blocks_are_handed_out_in_order() -> None:
    pool = BlockPool(4)
    assert ids(pool.allocate(3)) == [0, 1, 2]
    assert pool.usage() == PoolUsage(total=4, live=3, cached=0, free=1)


def test_unhashed_blocks_are_reused_before_any_cached_one() -> None:
    """Prompts shorter than a block do not push out good blocks."""
    pool = BlockPool(4)
    cached_chain(pool, "a", "b", "c")
    for _ in range(50):
        [partial] = pool.allocate(1)
        assert partial.block_id == 3
        pool.release(partial, 1.0)
    assert pool.usage() == PoolUsage(total=4, live=0, cached=3, free=1)


def test_eviction_takes_the_tail_of_the_least_recently_released_chain() -> None:
    """The parent outlives the child, so what remains can still be hit."""
    pool = BlockPool(6)
    old = cached_chain(pool, "a", "b", "c")
    new = cached_chain(pool, "x", "y", "z")
    assert ids(pool.allocate(1)) == [old[2].block_id]
    assert ids(pool.allocate(3)) == [old[0].block_id, old[1].block_id, new[2].block_id], "as they lie"
    assert pool.lookup(h("x")) is new[0] and pool.lookup(h("a")) is None


def test_a_hit_protects_a_chain_from_the_next_eviction() -> None:
    pool = BlockPool(4)
    first = cached_chain(pool, "a", "b")
    second = cached_chain(pool, "x", "y")
    for block in first:
        pool.acquire(block)
    for block in reversed(first):
        pool.release(block, 2.0)
    assert ids(pool.allocate(2)) == [second[0].block_id, second[1].block_id]


def test_the_second_copy_of_a_block_is_told_who_holds_the_hash() -> None:
    """One hash is one block; the copy stays without a hash."""
    pool = BlockPool(2)
    first, copy = pool.allocate(2)
    assert pool.register(first, h("a")) is first
    assert pool.register(copy, h("a")) is first
    assert copy.block_hash is None
    pool.release(copy, 0.0)
    assert pool.usage() == PoolUsage(total=2, live=1, cached=0, free=1)
    assert pool.drain_events() == [KvEvent(block_key(h("a")))]


def test_evicting_forgets_the_hash_and_says_so_in_order() -> None:
    """A recycled block is not reachable by its old hash."""
    pool = BlockPool(1)
    cached_chain(pool, "a")
    [block] = pool.allocate(1)
    pool.register(block, h("b"))
    assert pool.lookup(h("a")) is None and pool.lookup(h("b")) is block
    a, b = block_key(h("a")), block_key(h("b"))
    assert pool.drain_events() == [KvEvent(a), KvEvent(a, RemovalCause.EVICTED), KvEvent(b)]
    assert pool.drain_events() == []


def test_clearing_spares_live_blocks() -> None:
    pool = BlockPool(3)
    cached_chain(pool, "a", "b")
    pool.acquire(pool.blocks[0])
    assert pool.clear() == 1
    assert pool.usage() == PoolUsage(total=3, live=1, cached=0, free=2)
    assert pool.drain_events()[-1] == KvEvent(block_key(h("b")), RemovalCause.CLEARED)


def test_a_victim_counts_as_likely_to_be_hit_as_blocks_on_their_way_out_are() -> None:
    """Those that have waited half as long as the oldest: here two of three are hit, then half of all."""
    pool = BlockPool(64)
    chains = [[f"{n}"] for n in range(64)]
    for now, chain in enumerate(chains):
        cached_chain(pool, *chain, now=float(now))
    young, old = pool.lookup(h("40")), pool.lookup(h("20"))
    assert young and old and pool.reuse.share == 0.5
    pool.acquire(young)
    assert pool.reuse.share == 0.5, "it was in no danger"
    pool.acquire(old)
    assert pool.reuse.share == pytest.approx(3 / 5), "a guess of two hits in four, and one hit"
    pool.allocate(1)
    assert pool.reuse.share == pytest.approx(3 / 6)


def test_releasing_or_registering_what_nobody_holds_is_our_own_bug() -> None:
    """A double free is caught where it happens."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pool.blocks[0], 0.0)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(pool.blocks[0], h("a"))
    with pytest.raises(AssertionError, match=r"allocate\(2\)"):
        pool.allocate(2)
