"""Which chains of a pool are most worth handing over, hottest first.

A block's heat is how often it was found, the time that it was computed included, halved for every
`HALF_LIFE_S` since its last use. Whoever finds a block finds those before it, so heat falls along a chain,
and the hottest blocks of a pool are whole beginnings of chains. They are listed as chains that end where one
forks or cools down to a half: so a system prompt that all share goes before any of the conversations. What a
pin keeps goes before all else, however cold: somebody was promised that it would stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.errors import InvalidRequest
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.pins import ChainPin

HALF_LIFE_S = 300.0
SCANNED = 4
"""Cached blocks that are looked at, last used first, for each that may be listed: bounds how long a step
waits for the list, by about a microsecond each. What was not used for longer than those is not hot."""
MAX_CHAINS = 1024
"""Of one call that lists them, or copies them."""
MAX_BLOCKS = 16384


@dataclass(frozen=True, slots=True)
class HotBounds:
    """How long a list may be. Raises InvalidRequest."""

    chains: int
    blocks: int
    """In all chains, each counted once."""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("max_chains", self.chains, MAX_CHAINS),
            ("max_blocks", self.blocks, MAX_BLOCKS),
        ):
            if not 1 <= value <= most:
                raise InvalidRequest(name, f"must be 1 to {most}, is {value}")


@dataclass(frozen=True, slots=True)
class HotChain:
    """A chain from its first block on."""

    hashes: list[BlockHash]
    new_blocks: int
    """The last ones, which no chain listed before it has."""
    new_uses: int
    """How often those were found, in sum."""
    idle_s: float
    """Since the last use of the first of them; 0 while in use."""
    pin: ChainPin | None = None
    """What keeps its beginning."""


def hot_chains(pool: BlockPool, live: Iterable[Block], bounds: HotBounds, now: float) -> list[HotChain]:
    """Return the hottest chains of a pool. `live` are the blocks in use; those without a hash do not count.

    O(n log n) in the blocks that are looked at, whatever the pool's size.
    """
    idle = islice(pool.idle(), SCANNED * bounds.blocks)
    seen = {block.block_id: block for block in chain(live, idle) if block.block_hash is not None}
    # Of equals the first one seen is ranked first, and parents are seen before their children.
    hottest = heapq.nlargest(bounds.blocks, seen.values(), key=lambda block: _rank(block, now))
    added: list[list[Block]] = []
    by_end: dict[int, list[Block]] = {}
    for block in hottest:
        mine = by_end.pop(block.parent.block_id, None) if block.parent else None
        full = len(added) == bounds.chains
        if mine is None or (not full and _cools_down(mine[0], block, now)):
            if full:
                continue
            mine = []
            added.append(mine)
        mine.append(block)
        by_end[block.block_id] = mine
    return [_listed(blocks, now) for blocks in added]


def _listed(new: list[Block], now: float) -> HotChain:
    whole = _chain(new[-1])
    hashes = [block.block_hash for block in whole if block.block_hash is not None]
    return HotChain(hashes, len(new), sum(b.uses for b in new), _idle_s(new[0], now), _pin(whole))


def _pin(whole: list[Block]) -> ChainPin | None:
    """Return the lease of the last block that has one: those before it last as long at least."""
    for place in range(len(whole), 0, -1):
        lease = whole[place - 1].lease
        if lease is not None:
            return ChainPin(place, lease.ttl_s, lease.tenant)
    return None


def _rank(block: Block, now: float) -> tuple[bool, float]:
    return block.lease is not None, _heat(block, now)


def _cools_down(first: Block, block: Block, now: float) -> bool:
    return _kept(block) != _kept(first) or 2 * _heat(block, now) < _heat(first, now)


def _kept(block: Block) -> tuple[float, str] | None:
    return None if block.lease is None else (block.lease.ttl_s, block.lease.tenant)


def _heat(block: Block, now: float) -> float:
    return float((1 + block.uses) * 0.5 ** (_idle_s(block, now) / HALF_LIFE_S))


def _idle_s(block: Block, now: float) -> float:
    return 0.0 if block.ref_count else max(0.0, now - block.released_at)


def _chain(last: Block) -> list[Block]:
    blocks: list[Block] = []
    block: Block | None = last
    while block is not None:
        assert block.block_hash is not None, f"block {block.block_id} has left before a child of it"
        blocks.append(block)
        block = block.parent
    return blocks[::-1]
