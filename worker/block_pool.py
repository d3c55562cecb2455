"""The pool's bookkeeping: which blocks are live, which are cached, and which one goes next.

Every block is in exactly one of three states, so that `free + cached + live = total` at every step:

    live     ref_count > 0: some sequence reads or writes it
    cached   ref_count = 0, registered under a hash: can be hit, can be evicted
    free     ref_count = 0, no hash: nothing worth keeping in it

Allocation takes free blocks first, then evicts the least recently released cached block. Cached blocks
under a lease (pins.py) stand aside until it ends, and then join the others as if released at that moment.

The cache is prefix-closed, a block never leaves while a cached child of it exists, and that needs no
bookkeeping at all: whoever holds a child holds its parent too, and releases the child first. So in the
order of release every child stands before its parent, and evicting from the front evicts leaves first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from operator import attrgetter

from kvhive.proto.block_hash import BlockHash, BlockKey, block_key
from kvhive.proto.kv_events import KvEvent, RemovalCause
from kvhive.worker.late_reuse import LateReuse
from kvhive.worker.pins import Lease, Leases, PinBudget, PinRefusal


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool. `block_hash` is set exactly while the block is in the hash map."""

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    released_at: float = 0.0
    """When the last user let go, in seconds of the caller's clock; meaningful while cached."""
    lease: Lease | None = None
    """What keeps it from being evicted. Only registered blocks have one."""
    parent: Block | None = None
    """The block before it in its chain, which is registered as long as it is."""
    uses: int = 0
    """How often it was found since it was registered."""

    @property
    def evictable(self) -> bool:
        """Whether allocate() may hand it out, given that it is registered."""
        return self.ref_count == 0 and self.lease is None


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The pool's accounting. live + cached + free = total."""

    total: int
    live: int
    cached: int
    free: int
    pinned: int = 0
    """Of the cached ones, those that cannot be evicted before their leases end."""


class BlockPool:
    """Fixed blocks, a free queue, an LRU queue of cached blocks, and a hash map. O(1) per block."""

    def __init__(self, num_blocks: int, pin_budget: PinBudget | None = None) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: deque[Block] = deque(self.blocks)
        self._cached: OrderedDict[int, Block] = OrderedDict()  # least recently released first
        self._pinned: dict[int, Block] = {}  # cached too, but under a lease
        self.leases = Leases(num_blocks, pin_budget or PinBudget())
        self._by_hash: dict[BlockHash, Block] = {}
        self._events: list[KvEvent] = []
        self._last_release = 0.0
        self.reuse = LateReuse(num_blocks)

    @property
    def available(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + len(self._cached)

    def usage(self) -> PoolUsage:
        """Return the accounting."""
        total, free, pinned = len(self.blocks), len(self._free), len(self._pinned)
        cached = len(self._cached) + pinned
        return PoolUsage(total, live=total - free - cached, cached=cached, free=free, pinned=pinned)

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block registered under a hash, live or cached."""
        return self._by_hash.get(block_hash)

    def keys(self) -> list[BlockKey]:
        """Return the keys of all registered blocks; O(blocks)."""
        return [block_key(block_hash) for block_hash in self._by_hash]

    def allocate(self, count: int) -> list[Block]:
        """Hand out `count` blocks with ref_count 1 and no hash, evicting as needed.

        In the order of their places, whatever order they became free in: what lies in a row is copied and
        sent as one. The caller has checked `available`; asking for more is a bug of ours (AssertionError).
        """
        assert count <= self.available, f"allocate({count}) with {self.available} available"
        return sorted((self._take() for _ in range(count)), key=attrgetter("block_id"))

    def _take(self) -> Block:
        if self._free:
            block = self._free.popleft()
        else:
            _, block = self._cached.popitem(last=False)
            self.reuse.evicted()
            self._unregister(block, RemovalCause.EVICTED)
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """Add a user to a registered block."""
        if block.ref_count == 0:
            if block.lease is None:
                self._note_reuse(block)
                del self._cached[block.block_id]
            else:
                del self._pinned[block.block_id]
                self.leases.used(block.lease)
        block.ref_count += 1
        block.uses += 1

    def _note_reuse(self, block: Block) -> None:
        """A cached block is hit: was it on its way out?"""
        oldest = next(iter(self._cached.values())).released_at
        if 2 * block.released_at <= oldest + self._last_release:
            self.reuse.hit()

    def release(self, block: Block, now: float) -> None:
        """Remove a user. Release the blocks of a chain last block first: eviction relies on that order."""
        assert block.ref_count > 0, f"block {block.block_id} released more often than acquired"
        block.ref_count -= 1
        idle = block.ref_count == 0
        leased = block.lease is not None and self.leases.released(block.lease, now, idle)
        if not idle:
            return
        if block.block_hash is None:
            self._free.append(block)
            return
        block.released_at = self._last_release = now
        if leased:
            self._pinned[block.block_id] = block
        else:
            block.lease = None
            self._cached[block.block_id] = block

    def pin(
        self, chain: ReadOnly[Block], ttls: ReadOnly[float], tenant: str, now: float
    ) -> PinRefusal | None:
        """Keep live registered blocks, each for its seconds after its last use: all of them, or none.

        They are a chain from its first block on, and no parent's time is shorter than its child's.
        """
        new = charged = 0
        for block, ttl_s in zip(chain, ttls, strict=True):
            assert block.ref_count > 0, f"block {block.block_id} pinned while nobody holds it"
            assert block.block_hash is not None, f"block {block.block_id} pinned without a hash"
            lease = block.lease
            new += lease is None
            charged += lease is None or (lease.ttl_s < ttl_s and lease.tenant != tenant)
        refusal = self.leases.refusal(tenant, new, charged)
        if refusal is None:
            for depth, (block, ttl_s) in enumerate(zip(chain, ttls, strict=True)):
                asked = Lease(block.block_id, depth, tenant, ttl_s, now + ttl_s)
                block.lease = self.leases.grant(block.lease, asked)
        return refusal

    def expire(self, now: float) -> None:
        """Let the blocks whose leases have ended be evicted. O(log n) per ended lease, else O(1)."""
        for block_id in self.leases.due(now):
            block = self._pinned.pop(block_id)
            block.lease = None
            self._cached[block_id] = block

    def register(self, block: Block, block_hash: BlockHash, parent: Block | None = None) -> Block:
        """Make a live block, whose KV is now written, findable under its hash; `parent` is the one before it.

        Returns the block that holds the hash: another one when two sequences computed the same content, and
        then the caller should use that one instead.
        """
        assert block.ref_count > 0, f"block {block.block_id} registered while nobody holds it"
        assert block.block_hash is None, f"block {block.block_id} registered twice"
        holder = self._by_hash.setdefault(block_hash, block)
        if holder is block:
            block.block_hash = block_hash
            block.parent, block.uses = parent, 0
            self._events.append(KvEvent(block_key(block_hash)))
        return holder

    def clear(self) -> int:
        """Forget every cached block, pinned ones too (live ones stay); return how many."""
        for block in self._pinned.values():
            assert block.lease is not None, f"pinned block {block.block_id} has no lease"
            self.leases.end(block.lease)
            block.lease = None
        self.leases.forget_ended()
        cleared = [*self._cached.values(), *self._pinned.values()]
        self._cached.clear()
        self._pinned.clear()
        for block in cleared:
            self._unregister(block, RemovalCause.CLEARED)
            self._free.append(block)
        return len(cleared)

    def idle(self) -> Iterator[Block]:
        """Yield the cached blocks, those under a lease first, and then the last released one first."""
        yield from reversed(self._pinned.values())
        yield from reversed(self._cached.values())

    def drain_events(self) -> list[KvEvent]:
        """Return and forget what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _unregister(self, block: Block, cause: RemovalCause) -> None:
        assert block.block_hash is not None, f"cached block {block.block_id} has no hash"
        del self._by_hash[block.block_hash]
        self._events.append(KvEvent(block_key(block.block_hash), cause))
        block.block_hash = block.parent = None
