"""The net difference between what a worker's cache holds and what the index was told of it.

Events of many steps collapse here: a block that came and went between two batches is never mentioned, and
a block that went and came back costs nothing. So what waits for a Redis that is away is bounded by the
blocks it knows plus the blocks in the pool, whatever happens meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.kv_events import EventBatch, KvEvent, RemovalCause


class EventDelta:
    """Collects events from one thread and hands out batches to another; every method is thread-safe.

    Both maps keep insertion order, and the pool stores parents before children and evicts leaves first.
    So any leading part of the pending changes leaves the index prefix-closed, and so does any leading part
    of a snapshot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[BlockKey, None] = {}
        self._pending: dict[BlockKey, RemovalCause | None] = {}
        """None: held, and the index was not told yet. A cause: gone, and the index still has it."""

    def add(self, events: Iterable[KvEvent]) -> None:
        """Take in events in the order they happened; O(events). Repeated ones change nothing."""
        with self._lock:
            for event in events:
                if event.cause is None:
                    self._store(event.key)
                else:
                    self._remove(event.key, event.cause)

    def _store(self, key: BlockKey) -> None:
        if key in self._held:
            return
        self._held[key] = None
        if key in self._pending:
            del self._pending[key]
        else:
            self._pending[key] = None

    def _remove(self, key: BlockKey, cause: RemovalCause) -> None:
        if key not in self._held:
            return
        del self._held[key]
        if key in self._pending:
            del self._pending[key]
        else:
            self._pending[key] = cause

    def take(self, limit: int) -> EventBatch:
        """Remove and return the oldest `limit` pending changes; from now on they count as told.

        The caller must get the batch into the index, or call `restart`.
        """
        stored: list[BlockKey] = []
        removed: dict[RemovalCause, list[BlockKey]] = {}
        with self._lock:
            keys = [key for key, _ in zip(self._pending, range(limit), strict=False)]
            for key in keys:
                cause = self._pending.pop(key)
                if cause is None:
                    stored.append(key)
                else:
                    removed.setdefault(cause, []).append(key)
        return EventBatch(tuple(stored), {cause: tuple(gone) for cause, gone in removed.items()})

    def restart(self) -> None:
        """Forget what the index was told: everything held is pending again, parents first."""
        with self._lock:
            self._pending = dict.fromkeys(self._held)

    @property
    def pending(self) -> int:
        """Changes the index was not told yet, at most the blocks it knows plus the blocks held."""
        return len(self._pending)

    def held(self) -> frozenset[BlockKey]:
        """A copy of the keys the worker holds now; O(held), for checks."""
        with self._lock:
            return frozenset(self._held)
