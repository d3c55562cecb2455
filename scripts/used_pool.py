"""Where a chain's blocks lie in a pool that has been in use: between the row of a fresh one and chance."""

from __future__ import annotations

import random

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block, BlockPool

_RUNNING = 8
"""Requests that hold blocks at a time, and end in any order."""
LEAST_POOL = 4 * _RUNNING
"""Blocks that those and a chain need beside each other."""
_TURNS = 4
"""How often all of the pool has been given out before."""
_LENGTH, _SPREAD = 2.5, 0.9
"""Of a request's own blocks: lognormal, 12 in the middle, one in ten above 38."""


def used_places(blocks: int, pool_blocks: int, seed: int) -> list[int]:
    """Return the places that a worker's own pool gives to a chain after others have come and been evicted.

    Raises ValueError for more than half of the pool, and for a pool of fewer than LEAST_POOL blocks.
    """
    if pool_blocks < LEAST_POOL:
        raise ValueError(f"pool_blocks: must be at least {LEAST_POOL}, is {pool_blocks}")
    if blocks > pool_blocks // 2:
        raise ValueError(f"blocks: must be at most half of the pool's {pool_blocks}, is {blocks}")
    chance, pool = random.Random(seed), BlockPool(pool_blocks)
    running: list[list[Block]] = []
    longest = max(1, pool_blocks // (2 * _RUNNING + 2))
    given, now = 0, 0.0
    while given < _TURNS * pool_blocks:
        now += 1.0
        if len(running) == _RUNNING:
            for block in reversed(running.pop(chance.randrange(_RUNNING))):
                pool.release(block, now)
        length = min(longest, max(1, round(chance.lognormvariate(_LENGTH, _SPREAD))))
        running.append(pool.allocate(length))
        parent = None
        for block in running[-1]:
            given += 1
            parent = pool.register(block, BlockHash(given.to_bytes(32, "little")), parent)
    return [block.block_id for block in pool.allocate(blocks)]
