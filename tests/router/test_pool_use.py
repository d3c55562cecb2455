"""What a router's own requests hold in the workers' pools between two reports."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.proto.block_hash import BlockKey
from kvhive.router.pool_use import LONGEST_MEMORY_S, SETTLE_S, PoolUse


def chain(name: str) -> list[BlockKey]:
    """One key for each letter, which stands for all letters before it."""
    return [BlockKey(hashlib.md5(name[: i + 1].encode()).digest()) for i in range(len(name))]


def test_a_request_counts_until_a_report_contains_it() -> None:
    pools = PoolUse()
    pools.enter("a", "w1", chain("ab"), 32, now=10.0)
    assert pools.tokens("w1", reported=100, reported_at=9.0) == 132
    assert pools.tokens("w1", reported=100, reported_at=10.0 + SETTLE_S / 2) == 132
    assert pools.tokens("w1", reported=132, reported_at=10.0 + 2 * SETTLE_S) == 132
    assert pools.tokens("w2", reported=7, reported_at=9.0) == 7


def test_what_has_ended_since_the_report_is_taken_off_it() -> None:
    pools = PoolUse()
    pools.enter("a", "w1", chain("ab"), 32, now=10.0)
    pools.leave("a", now=12.0)
    pools.leave("a", now=12.0)
    assert pools.tokens("w1", reported=9, reported_at=9.0) == 9, "it was never in this one"
    assert pools.tokens("w1", reported=132, reported_at=11.0) == 100
    assert pools.tokens("w1", reported=5, reported_at=11.0) == 0
    assert pools.tokens("w1", reported=100, reported_at=12.5) == 100


def test_memory_is_bounded_by_what_runs_and_has_just_ended() -> None:
    pools = PoolUse()
    for i in range(1000):
        pools.enter(f"r{i}", "w1", (), 1, now=float(i))
        pools.leave(f"r{i}", now=float(i))
    assert not pools._held and not pools._worker_of
    assert len(pools._ended["w1"]) <= LONGEST_MEMORY_S + 1
    pools.enter("last", "w1", (), 1, now=1000.0)
    pools.drop("w1")
    pools.leave("last", now=1001.0)
    assert not pools._ended and not pools._held and not pools._worker_of


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=9), max_size=5), st.text("ab", max_size=9))
def test_shared_blocks_are_the_longest_common_beginning(others: list[str], mine: str) -> None:
    pools = PoolUse()
    for number, other in enumerate(others):
        pools.enter(f"r{number}", "w1", chain(other), 0, now=0.0)

    def common(other: str) -> int:
        return max(n for n in range(len(mine) + 1) if other.startswith(mine[:n]))

    assert pools.shared_blocks("w1", chain(mine)) == max(map(common, others), default=0)
    assert pools.shared_blocks("w2", chain(mine)) == 0
