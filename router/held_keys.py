"""The keys that a worker holds, for who knows by other means whether a key is among them.

A list does in a quarter of a set's time and memory what the mirror needs of one: to know how many there are,
and to hand them all out in slices when the worker has left. A key that goes stays in the list for a while;
every removal looks at some others, too, so that what stays is never more than about what is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from kvhive.proto.block_hash import BlockKey

LOOKED_AT = 2
"""Entries that a removal looks at: with one, what stays could never be caught up with."""


class HeldKeys:
    """Keys in no order, each once. The caller adds what is not there and removes what is."""

    __slots__ = ("_gone", "_listed")

    def __init__(self) -> None:
        self._listed: deque[BlockKey] = deque()
        self._gone: set[BlockKey] = set()
        """Removed, and listed still."""

    def __len__(self) -> int:
        return len(self._listed) - len(self._gone)

    def __iter__(self) -> Iterator[BlockKey]:
        return (key for key in self._listed if key not in self._gone)

    def add(self, keys: Collection[BlockKey]) -> None:
        """Take in keys that are not there, each once."""
        if self._gone and not self._gone.isdisjoint(keys):
            back = self._gone.intersection(keys)
            self._gone -= back
            keys = [key for key in keys if key not in back]
        self._listed.extend(keys)

    def remove(self, keys: Collection[BlockKey]) -> None:
        """Let go of keys that are there, each once."""
        listed, gone = self._listed, self._gone
        gone.update(keys)
        for _ in range(min(LOOKED_AT * len(keys), len(listed))):
            key = listed.popleft()
            if key in gone:
                gone.remove(key)
            else:
                listed.append(key)

    def pop(self, most: int) -> list[BlockKey]:
        """Let go of up to `most` keys and return them; some that had been removed may be among them."""
        part = [self._listed.pop() for _ in range(min(most, len(self._listed)))]
        self._gone.difference_update(part)
        return part

    def listed(self) -> int:
        """Entries that take memory."""
        return len(self._listed)
