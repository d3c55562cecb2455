"""Blocks of the pool that are on their way to another worker, or from one: what holds them meanwhile.

A loan keeps blocks that are being sent: they stay live until the sender gives them back, whatever happens
to who asked. An arrival holds the blocks of a chain that are being received, and the cached ones before
them, so that the cache stays prefix-closed. A received block gets its hash when its KV is in
the pool, never before; if the rest does not come, what came stays. Blocks are given back only when nothing
can write to them any more.

Everything here belongs to the engine's thread, and no torch is needed for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from itertools import chain

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.pins import ChainPin
from kvhive.worker.sequence import Sequence


@dataclass(slots=True, eq=False)
class Loan:
    """Blocks that are being sent: the leading ones of a chain."""

    blocks: list[Block]
    returned: bool = False

    @property
    def block_ids(self) -> list[int]:
        """Their places in the pool."""
        return [block.block_id for block in self.blocks]


@dataclass(slots=True, eq=False)
class Arrival:
    """A chain that is being received. `hashes[first:]` are on their way into `incoming`."""

    hashes: list[BlockHash]
    first: int
    """How many leading blocks were here before."""
    held: list[Block]
    """One block for each hash, in order; those from `registered` on have no hash yet."""
    registered: int
    began: float
    """When it was asked for, in seconds of the pool's clock."""
    waiting: list[Sequence] = field(default_factory=list)
    """Which sequences want it."""
    watching: list[Callable[[str], None]] = field(default_factory=list)
    """Who else does; called with the reason why not all came, empty when it did."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when nobody wants it any more. Any thread may look."""
    ended: bool = False

    @property
    def missing(self) -> list[BlockHash]:
        """The hashes that are to come."""
        return self.hashes[self.first :]

    def brings(self, hashes: ReadOnly[BlockHash]) -> int:
        """Return how many blocks of a chain it brings: chains that part are the same up to there."""
        return sum(mine == theirs for mine, theirs in zip(hashes[self.first :], self.missing, strict=False))

    @property
    def incoming(self) -> list[int]:
        """Where they are to be."""
        return [block.block_id for block in self.held[self.first :]]

    @property
    def arrived(self) -> int:
        """How many of them have come."""
        return self.registered - self.first


class BlockMoves:
    """The loans and arrivals of one pool. O(blocks) each, a microsecond a block."""

    def __init__(self, manager: KvCacheManager) -> None:
        self._manager = manager
        self._pool = manager.pool
        self._loans: set[Loan] = set()
        self._arrivals: dict[Arrival, None] = {}
        self._coming: dict[BlockHash, Arrival] = {}
        """By every hash that is to come, so that whoever lacks a later one finds it, too."""
        self.late = 0
        """Times that somebody reported of a transfer that had ended before."""

    @property
    def idle(self) -> bool:
        """Whether no block is live for a transfer's sake."""
        return not self._loans and not self._arrivals

    def held(self) -> list[Block]:
        """Return every block that a transfer holds, once for each hold."""
        lent = (loan.blocks for loan in self._loans)
        coming = (arrival.held for arrival in self._arrivals)
        return [*chain.from_iterable(lent), *chain.from_iterable(coming)]

    def arrivals(self) -> list[Arrival]:
        """Return the chains that are being received."""
        return list(self._arrivals)

    def count(self, hashes: ReadOnly[BlockHash]) -> int:
        """Return how many leading blocks of a chain are here."""
        return len(self._leading(hashes))

    def lend(self, hashes: ReadOnly[BlockHash], room: int) -> Loan:
        """Hold the leading blocks of a chain: as many as there are, and `room` that nobody uses at most."""
        loan = Loan([])
        for block in self._leading(hashes):
            room -= block.evictable
            if room < 0:
                break
            self._pool.acquire(block)
            loan.blocks.append(block)
        self._loans.add(loan)
        return loan

    def keep(self, hashes: ReadOnly[BlockHash], pin: ChainPin) -> None:
        """Pin the beginning of a chain that has come, if it is here whole and there is room in the budget."""
        blocks = self._leading(hashes)
        if len(blocks) == len(hashes):
            for block in blocks:
                self._pool.acquire(block)
            self._pool.pin(blocks, [pin.ttl_s] * len(blocks), pin.tenant, self._manager.clock())
            self._release(blocks)

    def give_back(self, loan: Loan) -> None:
        """Let go of what was lent; again does no harm."""
        if loan.returned:
            self.late += 1
            return
        loan.returned = True
        self._loans.discard(loan)
        self._release(loan.blocks)

    def under_way(self, hashes: ReadOnly[BlockHash]) -> Arrival | None:
        """Return the arrival that brings the first missing block of a chain."""
        first = len(self._leading(hashes))
        return self._coming.get(hashes[first]) if first < len(hashes) else None

    def expect(self, hashes: ReadOnly[BlockHash], reserved: int) -> Arrival | None:
        """Get blocks for the missing part of a chain, or for as much of it as there is room for.

        `reserved` blocks are left to others. None where nothing is missing, or there is no room at all.
        """
        here = self._leading(hashes)
        first, pool = len(here), self._pool
        room = pool.available - sum(block.evictable for block in here) - reserved
        count = min(len(hashes) - first, room)
        if count < 1:
            return None
        for block in here:
            pool.acquire(block)
        assert hashes[first] not in self._coming, "ask under_way first"
        arrival = Arrival(
            list(hashes[: first + count]), first, here + pool.allocate(count), first, self._manager.clock()
        )
        self._arrivals[arrival] = None
        for block_hash in arrival.missing:
            self._coming.setdefault(block_hash, arrival)
        return arrival

    def settle(self, arrival: Arrival, count: int) -> None:
        """The first `count` blocks that were to come are in the pool: register them."""
        if arrival.ended:
            self.late += 1
            return
        for index in range(arrival.registered, arrival.first + count):
            block = arrival.held[index]
            parent = arrival.held[index - 1] if index else None
            holder = self._pool.register(block, arrival.hashes[index], parent)
            if holder is not block:  # computed here meanwhile; one hash is one block
                self._pool.acquire(holder)
                self._pool.release(block, self._manager.clock())
                arrival.held[index] = holder
        arrival.registered = max(arrival.registered, arrival.first + count)

    def end(self, arrival: Arrival) -> list[Sequence]:
        """Let go of a chain, come or not, and return who waited for it. Nothing writes to its blocks now."""
        if arrival.ended:
            self.late += 1
            return []
        arrival.ended = True
        del self._arrivals[arrival]
        for block_hash in arrival.missing:
            if self._coming.get(block_hash) is arrival:
                del self._coming[block_hash]
        self._release(arrival.held)
        return arrival.waiting

    def _leading(self, hashes: ReadOnly[BlockHash]) -> list[Block]:
        blocks: list[Block] = []
        for block_hash in hashes:
            block = self._pool.lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _release(self, blocks: ReadOnly[Block]) -> None:
        now = self._manager.clock()
        for block in reversed(blocks):  # children first, as eviction relies on
            self._pool.release(block, now)
