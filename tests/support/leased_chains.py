"""Random holders of two pinned chains on a bare pool, while room is made and while it is not.

Not by hypothesis: its examples have too few steps per second to come upon what needs four of them in a row.
"""

from __future__ import annotations

import random

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.pins import PinBudget

POOL = 12
DEPTH = 3


class LeasedChains:
    """Time passes between any two of: a use, a release, a look at which leases have ended, an eviction."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pool = BlockPool(POOL, PinBudget(0.9, 0.9))
        self.now = 0.0
        self.holders: list[list[Block]] = []

    def walk(self, steps: int) -> None:
        """Take random steps; the promises hold after each."""
        rules = (self.use, self.pin, self.release, self.renew, self.look, self.evict)
        for _ in range(steps):
            self.now += self.chance.choice((0.0, 0.0, 1.0, 5.0, 9.0))
            self.chance.choice(rules)()
            self.check()

    def use(self) -> None:
        """Hold the beginning of a chain: what is cached of it, and the rest computed."""
        held: list[Block] = []
        name = self.chance.choice("ab")
        for depth in range(self.chance.randint(1, DEPTH)):
            block_hash = BlockHash(f"{name}{depth}".encode().ljust(32, b"."))
            block = self.pool.lookup(block_hash)
            if block is not None:
                self.pool.acquire(block)
            elif self.pool.available:
                (block,) = self.pool.allocate(1)
                self.pool.register(block, block_hash, held[-1] if held else None)
            else:
                break
            held.append(block)
        if held:
            self.holders.append(held)

    def pin(self) -> None:
        if self.holders:
            chain = self.chance.choice(self.holders)
            self.pool.pin(chain, [self.chance.choice((5.0, 10.0))] * len(chain), "t", self.now)

    def release(self) -> None:
        if self.holders:
            for block in reversed(self.holders.pop(self.chance.randrange(len(self.holders)))):
                self.pool.release(block, self.now)

    def renew(self) -> None:
        self.pool.leases.renew(self.chance.random() < 0.3, self.now)

    def look(self) -> None:
        """See which leases have ended, as every step does."""
        self.pool.expire(self.now)

    def evict(self) -> None:
        """Take blocks for something that is not worth keeping."""
        for block in self.pool.allocate(self.chance.randint(0, self.pool.available)):
            self.pool.release(block, self.now)

    def check(self) -> None:
        """A block is evicted after all its children, and not while one of them is under a lease."""
        places = {block_id: place for place, block_id in enumerate(self.pool._cached)}
        for block in self.pool.blocks:
            parent = block.parent
            if block.block_hash is None or parent is None:
                continue
            assert parent.block_hash is not None, "a block was left without its parent"
            if parent.block_id in places:
                assert places.get(block.block_id, POOL) < places[parent.block_id]
