"""Blocks on their way: who holds them, when they get a hash, and in which order they may be evicted."""

from __future__ import annotations

import pytest
from engine_rig import ROOT

from kvhive.proto.block_chain import hash_chain
from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_moves import BlockMoves
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.kv_cache_manager import KvCacheManager

CHAIN = hash_chain(ROOT, list(range(24)), 4)


class Moves:
    """Transfers of one small pool."""

    def __init__(self, blocks: int = 8) -> None:
        self.pool = BlockPool(blocks)
        self.moves = BlockMoves(KvCacheManager(self.pool, 4, ROOT, lambda: 0.0))

    def bring(self, hashes: list[BlockHash], count: int | None = None) -> None:
        arrival = self.moves.expect(hashes, 0)
        assert arrival is not None
        self.moves.settle(arrival, len(arrival.missing) if count is None else count)
        self.moves.end(arrival)

    def evicted(self, count: int) -> list[BlockHash]:
        """Take blocks, and say whose hashes went, in order."""
        before = list(self.pool._by_hash)
        gone: list[BlockHash] = []
        for _ in range(count):
            self.pool.allocate(1)
            gone += [h for h in before if h not in self.pool._by_hash and h not in gone]
        return gone


def test_a_block_has_no_hash_before_it_has_arrived() -> None:
    rig = Moves()
    arrival = rig.moves.expect(CHAIN[:4], 0)
    assert arrival is not None and len(arrival.missing) == len(set(arrival.incoming)) == 4
    assert rig.pool.usage().live == 4 and not rig.pool._by_hash
    rig.moves.settle(arrival, 3)
    assert list(rig.pool._by_hash) == CHAIN[:3]
    rig.moves.settle(arrival, 2)  # news that are older than what is known
    assert list(rig.pool._by_hash) == CHAIN[:3]
    rig.moves.end(arrival)
    usage = rig.pool.usage()
    assert (usage.live, usage.cached, usage.free) == (0, 3, 5)


def test_what_has_come_is_evicted_leaves_first() -> None:
    rig = Moves()
    rig.bring(CHAIN[:4])
    assert rig.evicted(8) == CHAIN[3::-1]


def test_what_was_lent_is_evicted_leaves_first_and_not_while_it_is_lent() -> None:
    rig = Moves()
    rig.bring(CHAIN[:4])
    loan = rig.moves.lend(CHAIN, rig.pool.available)
    assert len(loan.block_ids) == 4
    assert rig.pool.available == 4
    rig.moves.give_back(loan)
    rig.moves.give_back(loan)
    assert rig.moves.late == 1 and rig.moves.idle
    assert rig.evicted(8) == CHAIN[3::-1]


def test_the_part_that_is_here_is_held_while_the_rest_comes() -> None:
    """Else a parent could go before its child comes."""
    rig = Moves()
    rig.bring(CHAIN[:3])
    arrival = rig.moves.expect(CHAIN[:5], 0)
    assert arrival is not None and (arrival.first, len(arrival.missing)) == (3, 2)
    assert rig.pool.usage().live == 5
    rig.pool.allocate(3)
    rig.moves.settle(arrival, 2)
    rig.moves.end(arrival)
    assert list(rig.pool._by_hash) == CHAIN[:5]


@pytest.mark.parametrize(("reserved", "count"), [(0, 6), (3, 5), (5, 3), (7, 1), (8, None), (9, None)])
def test_no_more_is_expected_than_there_is_room_for(reserved: int, count: int | None) -> None:
    arrival = Moves().moves.expect(CHAIN, reserved)
    assert (None if arrival is None else len(arrival.missing)) == count


def test_cached_blocks_of_the_chain_itself_make_no_room() -> None:
    rig = Moves(4)
    rig.bring(CHAIN[:3])
    arrival = rig.moves.expect(CHAIN, 0)
    assert arrival is not None and len(arrival.missing) == 1


def test_nothing_is_expected_where_nothing_is_missing() -> None:
    rig = Moves()
    rig.bring(CHAIN[:3])
    assert rig.moves.expect(CHAIN[:3], 0) is None
    assert rig.moves.under_way(CHAIN[:3]) is None


def test_a_chain_that_is_under_way_is_found_by_all_who_lack_the_same_block() -> None:
    rig = Moves()
    arrival = rig.moves.expect(CHAIN[:3], 0)
    assert arrival is not None
    assert rig.moves.under_way(CHAIN) is arrival
    assert rig.moves.under_way(hash_chain(ROOT, [9] * 8, 4)) is None
    rig.moves.end(arrival)
    assert rig.moves.under_way(CHAIN) is None


def test_one_hash_is_one_block_although_it_was_computed_meanwhile() -> None:
    rig = Moves()
    arrival = rig.moves.expect(CHAIN[:2], 0)
    assert arrival is not None
    (own,) = rig.pool.allocate(1)
    rig.pool.register(own, CHAIN[0])
    rig.moves.settle(arrival, 2)
    assert rig.pool.lookup(CHAIN[0]) is own and own.ref_count == 2
    rig.moves.end(arrival)
    rig.pool.release(own, 0.0)
    usage = rig.pool.usage()
    assert (usage.live, usage.cached, usage.free) == (0, 2, 6)


def test_late_reports_are_counted_and_change_nothing() -> None:
    """Fault 82."""
    rig = Moves()
    arrival = rig.moves.expect(CHAIN[:2], 0)
    assert arrival is not None
    rig.moves.end(arrival)
    rig.moves.settle(arrival, 2)
    assert rig.moves.end(arrival) == []
    assert rig.moves.late == 2 and not rig.pool._by_hash
    assert rig.pool.usage().free == 8


def test_a_chain_is_found_by_a_later_block_too_once_its_first_ones_have_come() -> None:
    rig = Moves()
    arrival = rig.moves.expect(CHAIN[:4], 0)
    assert arrival is not None
    rig.moves.settle(arrival, 2)
    assert rig.moves.under_way(CHAIN) is arrival
    rig.moves.end(arrival)
    assert rig.moves.under_way(CHAIN) is None and not rig.moves._coming


def test_nothing_is_lent_that_running_sequences_were_promised() -> None:
    rig = Moves()
    rig.bring(CHAIN[:4])
    assert len(rig.moves.lend(CHAIN, 2).block_ids) == 2
    assert len(rig.moves.lend(CHAIN, 0).block_ids) == 2, "what is live already costs nobody anything"
