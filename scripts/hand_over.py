"""Hands a worker's hot chains to others, within a bound: what a drain does, and what warms a new worker.

The giver says what is hottest, inheritance.py who gets what, and the heirs pull it (CopyChains), the hottest
first, so that whatever the bound cuts off was worth least. Whatever fails is left: nothing waits for it but
this, and the survivors compute it when somebody asks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from kvhive.proto.block_hash import BlockHash, BlockKey, block_key
from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import WorkerRecord
from kvhive.proto.v1 import worker_pb2
from kvhive.scripts.inheritance import Heir, share_out
from kvhive.scripts.worker_calls import WorkerCalls

log = logging.getLogger(__name__)

MAX_CHAINS = 256
MAX_BLOCKS = 16_384
"""Of one hand-over: 262,144 tokens of the hottest beginnings, 32 GiB of an 8B model's."""
MAX_HEIRS = 8
"""Survivors that inherit, those with the most room: beyond, it is the index that spreads what is hot."""
CACHED_SHARE = 0.5
"""A survivor gives up at most this share of what it has cached itself, unpinned, and its free blocks."""
CHAINS_A_CALL = 8
"""So that progress is seen, and a heir that has died costs one call."""
MAX_FAILED_CALLS = 3
"""After as many failed calls a giver or an heir is left alone."""
_HASH_BYTES = 32


@dataclass(slots=True)
class HandOver:
    """How far one is. What a survivor had already counts as handed over."""

    chains: int = 0
    """What is to be handed over."""
    chains_done: int = 0
    blocks: int = 0
    """Blocks in them, each counted once."""
    blocks_done: int = 0
    failed: int = 0
    """Chains that did not come whole."""
    error: str = ""
    """The last cause."""


class HeldKeys(Protocol):
    """Which of some chains' blocks a worker holds, as far as the index says."""

    async def held(self, worker: WorkerRecord, chains: Sequence[Sequence[BlockKey]]) -> set[BlockKey]:
        """Return keys of blocks that it holds; nothing where nobody knows."""
        ...


async def hand_over(
    giver: WorkerRecord,
    heirs: Sequence[WorkerRecord],
    calls: WorkerCalls,
    index: HeldKeys,
    progress: HandOver,
) -> None:
    """Copy what is hot at `giver` to `heirs`, noting it in `progress`. Cancel it at the bound.

    Raises Unavailable when the giver cannot say what it has.
    """
    records = sorted(heirs, key=_room, reverse=True)[:MAX_HEIRS]
    room = sum(_room(record) for record in records)
    if not room:
        progress.error = "no survivor has room"
        return
    hot = await calls.hot_chains(giver, MAX_CHAINS, min(MAX_BLOCKS, room))
    chains = [_keys(chain.chain.hashes) for chain in hot]
    lots = [Heir(r.worker_id, _room(r), await index.held(r, chains)) for r in records]
    named = share_out(chains, lots)
    progress.chains, progress.blocks = len(hot), sum(chain.new_blocks for chain in hot)
    progress.chains_done = progress.blocks_done = progress.failed = 0
    by_id = {record.worker_id: record for record in records}
    failures: dict[str, int] = {}
    for heir_id, some in _batches(named):
        if failures.get(heir_id, 0) < MAX_FAILED_CALLS:
            asked = [hot[index] for index in some]
            if not await _give(giver, by_id[heir_id], asked, calls, progress):
                failures[heir_id] = failures.get(heir_id, 0) + 1


async def _give(
    giver: WorkerRecord,
    heir: WorkerRecord,
    hot: Sequence[worker_pb2.HotChain],
    calls: WorkerCalls,
    progress: HandOver,
) -> bool:
    """Copy a few chains to one heir; False when the call failed."""
    answers: Any = calls.copy_chains(giver, heir, [each.chain for each in hot], timeout_s=60.0)
    try:
        async with aclosing(answers):
            async for answer in answers:
                wanted = hot[answer.chain]
                missing = len(wanted.chain.hashes) // _HASH_BYTES - answer.blocks
                progress.chains_done += missing == 0
                progress.blocks_done += max(0, wanted.new_blocks - missing)
                if missing:
                    progress.failed += 1
                    progress.error = f"to {heir.worker_id}: {answer.error}"
        return True
    except Unavailable as error:
        log.warning("hand-over failed from=%s to=%s: %s", giver.worker_id, heir.worker_id, error)
        progress.failed += len(hot)
        progress.error = f"to {heir.worker_id}: {error}"
        return False


def _batches(named: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Group chains, in their order, by heir, a few at a time."""
    waiting: dict[str, list[int]] = {}
    for index, heir_id in enumerate(named):
        if heir_id:
            some = waiting.setdefault(heir_id, [])
            some.append(index)
            if len(some) == CHAINS_A_CALL:
                yield heir_id, waiting.pop(heir_id)
    yield from waiting.items()


def _room(worker: WorkerRecord) -> int:
    load = worker.load
    return load.blocks_free + int(CACHED_SHARE * max(0, load.blocks_cached - load.blocks_pinned))


def _keys(packed: bytes) -> list[BlockKey]:
    starts = range(0, len(packed), _HASH_BYTES)
    return [block_key(BlockHash(packed[at : at + _HASH_BYTES])) for at in starts]
