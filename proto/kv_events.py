"""What a worker tells the world about its cache: which blocks it now holds, and why others went.

A batch is the *net* change since the batch before it: `stored` and `removed` are disjoint, so a reader
may apply them in either order and twice. Batches of one worker and epoch are numbered from 1 without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from kvhive.proto.block_hash import BLOCK_KEY_BYTES, BlockKey, cut

_KEY = f"{BLOCK_KEY_BYTES}s"


class RemovalCause(StrEnum):
    """Why a block left a worker's cache."""

    EVICTED = "evicted"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of one block in a pool, in the order it happened. `cause` is None for a stored block."""

    key: BlockKey
    cause: RemovalCause | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A net change of one worker's cache."""

    stored: tuple[BlockKey, ...] = ()
    removed: dict[RemovalCause, tuple[BlockKey, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stored) + sum(len(keys) for keys in self.removed.values())

    def removed_keys(self) -> Iterator[BlockKey]:
        """Yield every removed key, whatever its cause."""
        for keys in self.removed.values():
            yield from keys


def pack_keys(keys: tuple[BlockKey, ...] | list[BlockKey]) -> bytes:
    """Concatenate 16-byte keys."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> tuple[BlockKey, ...]:
    """Split concatenated keys. Raises ValueError when the length is not a multiple of 16."""
    if len(packed) % BLOCK_KEY_BYTES:
        raise ValueError(f"packed keys: {len(packed)} bytes is not a multiple of {BLOCK_KEY_BYTES}")
    return cast("tuple[BlockKey, ...]", cut(packed, _KEY, BLOCK_KEY_BYTES))
