"""What is handed over first: blocks that were found often and lately, as chains from their first block on."""

from __future__ import annotations

import pytest

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.errors import InvalidRequest
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.hot_chains import HALF_LIFE_S, SCANNED, HotBounds, hot_chains
from kvhive.worker.pins import ChainPin


def h(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


class Rig:
    """A pool whose prompts are words, a letter a block: those with the same beginning share it."""

    def __init__(self, blocks: int = 64) -> None:
        self.pool = BlockPool(blocks)

    def hold(self, prompt: str) -> list[Block]:
        held: list[Block] = []
        for end in range(1, len(prompt) + 1):
            name = h(prompt[:end])
            block = self.pool.lookup(name)
            if block is not None:
                self.pool.acquire(block)
            else:
                [block] = self.pool.allocate(1)
                self.pool.register(block, name, held[-1] if held else None)
            held.append(block)
        return held

    def ask(self, prompt: str, now: float = 0.0, times: int = 1) -> None:
        for _ in range(times):
            for block in reversed(self.hold(prompt)):
                self.pool.release(block, now)

    def listed(self, chains: int = 100, blocks: int = 100, now: float = 0.0) -> list[tuple[str, int, int]]:
        found = hot_chains(self.pool, (), HotBounds(chains, blocks), now)
        names = [found_one.hashes[-1].rstrip(b".").decode() for found_one in found]
        for name, chain in zip(names, found, strict=True):
            assert chain.hashes == [h(name[:end]) for end in range(1, len(name) + 1)], (
                "from the first block on"
            )
        return [(name, c.new_blocks, c.new_uses) for name, c in zip(names, found, strict=True)]


def test_what_all_share_goes_before_what_one_of_them_has() -> None:
    rig = Rig()
    for tail in "xyz":
        rig.ask(f"sys{tail}{tail}")
    rig.ask("other", times=2)
    assert rig.listed() == [("sys", 3, 6), ("other", 5, 5), ("syszz", 2, 0), ("sysyy", 2, 0), ("sysxx", 2, 0)]


def test_an_old_crowd_is_worth_less_than_a_few_who_were_just_here() -> None:
    rig = Rig()
    rig.ask("old", 0.0, times=8)
    rig.ask("new", 4 * HALF_LIFE_S, times=2)
    assert [name for name, *_ in rig.listed(now=4 * HALF_LIFE_S)] == ["new", "old"]
    assert [name for name, *_ in rig.listed(chains=1, now=0.0)] == ["old"]


def test_no_more_is_listed_than_was_asked_for() -> None:
    rig = Rig()
    rig.ask("abcdef", times=3)
    rig.ask("xyz")
    assert rig.listed(blocks=4) == [("abcd", 4, 8)]
    assert rig.listed(chains=1) == [("abcdef", 6, 12)]
    for tail in "uvw":
        rig.ask(f"abc{tail}")
    assert rig.listed(chains=1)[0][0] == "abcdef", "the last chain goes on where it may not end"


def test_blocks_in_use_and_under_a_lease_count_and_what_has_gone_does_not() -> None:
    rig = Rig(blocks=8)
    leased = rig.hold("pin")
    assert rig.pool.pin(leased[:2], [60.0, 60.0], "t", 0.0) is None
    for block in reversed(leased):
        rig.pool.release(block, 0.0)
    rig.ask("gone")
    live = rig.hold("live")
    found = hot_chains(rig.pool, live, HotBounds(9, 9), 100.0)
    assert {(c.hashes[-1], c.idle_s) for c in found} >= {(h("live"), 0.0), (h("pi"), 100.0)}
    assert all(rig.pool.lookup(block_hash) for c in found for block_hash in c.hashes)


def test_what_a_pin_keeps_goes_first_however_cold_and_its_tail_does_not() -> None:
    rig = Rig()
    leased = rig.hold("pinned")
    assert rig.pool.pin(leased[:3], [9000.0] * 3, "t", 0.0) is None
    for block in reversed(leased):
        rig.pool.release(block, 0.0)
    rig.ask("hot", now=3000.0, times=5)
    assert rig.listed(now=3000.0) == [("pin", 3, 0), ("hot", 3, 12), ("pinned", 3, 0)]


def test_a_chain_says_what_keeps_its_beginning_and_ends_where_that_changes() -> None:
    rig = Rig()
    blocks = rig.hold("abcdef")
    assert rig.pool.pin(blocks[:4], [90.0, 90.0, 30.0, 30.0], "t", 0.0) is None
    for block in reversed(blocks):
        rig.pool.release(block, 0.0)
    found = hot_chains(rig.pool, (), HotBounds(9, 9), 0.0)
    assert [(len(c.hashes), c.new_blocks, c.pin) for c in found] == [
        (2, 2, ChainPin(2, 90.0, "t")),
        (4, 2, ChainPin(4, 30.0, "t")),
        (6, 2, ChainPin(4, 30.0, "t")),
    ]


def test_a_block_that_is_used_again_begins_anew() -> None:
    rig = Rig(blocks=2)
    rig.ask("ab", times=5)
    rig.ask("xy")
    assert rig.listed() == [("xy", 2, 0)]


def test_only_so_many_blocks_are_looked_at() -> None:
    rig = Rig(blocks=64)
    rig.ask("h", times=9)
    for name in range(SCANNED):
        rig.ask(chr(ord("0") + name), now=1.0)
    assert rig.listed(blocks=1, now=1.0) != [("h", 1, 8)]
    assert rig.listed(blocks=2, now=1.0)[0] == ("h", 1, 8)


@pytest.mark.parametrize(
    ("chains", "blocks", "name"),
    [(0, 1, "max_chains"), (1025, 1, "max_chains"), (1, 0, "max_blocks"), (1, 16385, "max_blocks")],
)
def test_bounds_that_are_none_are_refused_by_name(chains: int, blocks: int, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        HotBounds(chains, blocks)
