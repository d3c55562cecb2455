"""The index in this process: key -> bitmap of the workers that hold it, searched by bisection.

A worker has a slot, a bit number. Its snapshot is loaded into a slot that no search sees, and shown at once
when it is complete; a slot that is given up is hidden at once and cleared later, a slice at a time. So no
search meets a half-loaded worker, and no update holds the event loop for long.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.kv_events import EventBatch
from kvhive.router.held_keys import HeldKeys

MAX_KEYS_PER_WORKER = 4_194_304
"""64 million tokens at 16 a block: far above any pool, so that a damaged index cannot fill our memory. A
worker that reports its pool's size is held to that."""

SWEEP_KEYS = 4096


class _Slot:
    __slots__ = ("bit", "keys", "most_keys", "worker_id")

    def __init__(self, number: int, worker_id: str, most_keys: int) -> None:
        self.bit = 1 << number
        self.most_keys = most_keys
        self.worker_id = worker_id
        self.keys = HeldKeys()
        """Those whose bit is set."""


class SnapshotLoad:
    """A worker's blocks on their way in; nothing is seen of them before `commit`."""

    def __init__(self, mirror: KvIndexMirror, slot: _Slot) -> None:
        self._mirror = mirror
        self._slot = slot

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Take in some of the worker's keys, in any order; repeated ones change nothing."""
        self._mirror._store(self._slot, keys)

    def commit(self) -> None:
        """Show the worker with exactly these blocks, instead of what was known of it before."""
        self._mirror._show(self._slot)

    def abandon(self) -> None:
        """Throw the load away; what was known of the worker stays."""
        self._mirror._retire(self._slot)


class KvIndexMirror:
    """A KvIndex for the event loop's thread. Memory is about 150 bytes per (worker, block)."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_keys_per_worker: int = MAX_KEYS_PER_WORKER
    ) -> None:
        self.refused_keys = 0
        """Keys beyond the limit per worker, ignored."""
        self._clock = clock
        self._max_keys = max_keys_per_worker
        self._table: dict[BlockKey, int] = {}
        self._slots: dict[str, _Slot] = {}
        self._names: dict[int, str] = {}
        """Bit -> worker id, visible slots only."""
        self._visible = 0
        self._retired: deque[_Slot] = deque()
        self._bounds: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._next_number = 0
        self._fresh_at = -math.inf

    async def prepare(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: everything is here."""

    def match(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """Return, for each worker that holds the first block, how many leading blocks it holds.

        Each probe halves the range of all workers that are still together, so 4096 blocks take 15 us.
        """
        if not keys:
            return {}
        lookup = self._table.get
        holders = lookup(keys[0], 0) & self._visible
        lengths: dict[str, int] = {}
        ranges = [(1, len(keys), holders)] if holders else []
        while ranges:
            low, high, workers = ranges.pop()
            while low < high:
                middle = (low + high) >> 1
                holding = workers & lookup(keys[middle], 0)
                if holding:
                    if holding != workers:
                        ranges.append((low, middle, workers ^ holding))
                    low, workers = middle + 1, holding
                else:
                    high = middle
            while workers:
                bit = workers & -workers
                lengths[self._names[bit]] = low
                workers ^= bit
        return lengths

    def walk(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """What `match` returns, block by block: its meaning, for checks."""
        lengths: dict[str, int] = {}
        alive = self._visible
        for key in keys:
            alive &= self._table.get(key, 0)
            if not alive:
                break
            for bit, worker_id in self._names.items():
                if alive & bit:
                    lengths[worker_id] = lengths.get(worker_id, 0) + 1
        return lengths

    def block_count(self, worker_id: str) -> int:
        """Blocks known to be held by a worker; 0 for an unknown one."""
        slot = self._slots.get(worker_id)
        return len(slot.keys) if slot else 0

    def held(self, worker_id: str) -> list[BlockKey]:
        """Return the keys of the blocks known to be held by a worker; O(blocks), for checks."""
        slot = self._slots.get(worker_id)
        return list(slot.keys) if slot else []

    def total_blocks(self) -> int:
        """(worker, block) pairs of all workers."""
        return sum(len(slot.keys) for slot in self._slots.values())

    def distinct_blocks(self) -> int:
        """Entries in the table, those of slots that are not swept yet included."""
        return len(self._table)

    def staleness_s(self) -> float:
        """Seconds since the index was last known to be up to date; infinity before the first time."""
        return self._clock() - self._fresh_at

    def touch(self, now: float) -> None:
        """Everything published until `now` (monotonic seconds) has been applied."""
        self._fresh_at = max(self._fresh_at, now)

    def apply(self, worker_id: str, batch: EventBatch) -> None:
        """Apply a net change; idempotent. A worker never heard of begins with nothing."""
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = self._new_slot(worker_id)
            self._show(slot)
        self._store(slot, batch.stored)
        if batch.removed:
            self._clear(slot, batch.removed_keys())

    def replace(self, worker_id: str, keys: Iterable[BlockKey]) -> None:
        """Let a worker hold exactly these blocks, at once."""
        load = self.load(worker_id)
        load.add(keys)
        load.commit()

    def load(self, worker_id: str) -> SnapshotLoad:
        """Begin a snapshot of a worker, to be committed or abandoned."""
        return SnapshotLoad(self, self._new_slot(worker_id))

    def bound(self, worker_id: str, most_keys: int) -> None:
        """Believe a worker no more keys than its pool can have, from its next snapshot on."""
        self._bounds[worker_id] = most_keys

    def drop(self, worker_id: str) -> None:
        """Forget a worker at once; its memory comes back with `sweep`."""
        self._bounds.pop(worker_id, None)
        self._hide(worker_id)

    def clear(self) -> None:
        """Forget everybody, and give back what the emptied table still takes."""
        self._table, self._slots, self._names, self._retired = {}, {}, {}, deque()
        self._visible, self._free_numbers, self._next_number = 0, [], 0

    def sweep(self, limit: int = SWEEP_KEYS) -> bool:
        """Clear up to `limit` keys of slots given up; return whether some are left."""
        while self._retired and limit > 0:
            slot = self._retired[0]
            part = slot.keys.pop(limit)
            limit -= max(1, len(part))
            self._unset(slot.bit, part)
            if not slot.keys.listed():
                self._retired.popleft()
                heapq.heappush(self._free_numbers, slot.bit.bit_length() - 1)
        return bool(self._retired)

    def _new_slot(self, worker_id: str) -> _Slot:
        most = min(self._max_keys, self._bounds.get(worker_id, self._max_keys))
        if self._free_numbers:
            return _Slot(heapq.heappop(self._free_numbers), worker_id, most)
        self._next_number += 1
        return _Slot(self._next_number - 1, worker_id, most)

    def _show(self, slot: _Slot) -> None:
        self._hide(slot.worker_id)
        self._slots[slot.worker_id] = slot
        self._names[slot.bit] = slot.worker_id
        self._visible |= slot.bit

    def _hide(self, worker_id: str) -> None:
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            self._retire(slot)

    def _retire(self, slot: _Slot) -> None:
        self._visible &= ~slot.bit
        self._names.pop(slot.bit, None)
        self._retired.append(slot)

    def _store(self, slot: _Slot, keys: Iterable[BlockKey]) -> None:
        table, bit = self._table, slot.bit
        new = dict.fromkeys(self._within(slot, keys if isinstance(keys, tuple) else tuple(keys)), bit)
        if table.keys().isdisjoint(new):  # as most are: what one worker just computed
            table.update(new)
            slot.keys.add(new)
            return
        lookup = table.get
        missing = [key for key in new if not lookup(key, 0) & bit]
        for key in missing:
            holders = lookup(key)
            # A new key shares the slot's own number rather than keep one of its own: 32 bytes less a block.
            table[key] = bit if holders is None else holders | bit
        slot.keys.add(missing)

    def _within(self, slot: _Slot, keys: tuple[BlockKey, ...]) -> tuple[BlockKey, ...]:
        """What of these a worker may still have; the rest is counted."""
        room = slot.most_keys - len(slot.keys)
        if len(keys) <= room:
            return keys
        new = dict.fromkeys(key for key in keys if not self._holds(slot, key))
        self.refused_keys += max(0, len(new) - room)
        return tuple(itertools.islice(new, max(0, room)))

    def _clear(self, slot: _Slot, keys: Iterable[BlockKey]) -> None:
        gone = [key for key in dict.fromkeys(keys) if self._holds(slot, key)]
        slot.keys.remove(gone)
        self._unset(slot.bit, gone)

    def _holds(self, slot: _Slot, key: BlockKey) -> bool:
        return self._table.get(key, 0) & slot.bit != 0

    def _unset(self, bit: int, keys: Iterable[BlockKey]) -> None:
        table, mask = self._table, ~bit
        for key in keys:
            left = table.get(key, 0) & mask
            if left:
                table[key] = left
            else:
                table.pop(key, None)
