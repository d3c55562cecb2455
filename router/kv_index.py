"""Which worker holds how much of a prompt: the contract, and nothing else.

Implementations: `KvIndexMirror` (kv_index_mirror.py, in this process, fed from Redis by kv_index_reader.py),
`KvIndexRedis` (kv_index_redis.py, asked of Redis per prompt) and `KvIndexChoice` (kv_index_choice.py, one or
the other by size). The answer is advice: a worker decides hits by its own full hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvhive.proto.block_hash import BlockKey


class KvIndex(Protocol):
    """Maps chains of block keys to the workers that hold them.

    Caches are prefix-closed (a worker that holds block i of a chain holds all before it), so a match is a
    length. `match` runs on the event loop and must take microseconds; it returns only workers that hold at
    least one block; an empty chain matches nobody. Whatever must be waited for belongs into `prepare`, which
    is awaited once per request; a chain that was not prepared may match nobody.
    """

    async def prepare(self, keys: Sequence[BlockKey]) -> None:
        """Fetch what `match` of this chain will need. Bounded in time, and never fails for a lost Redis."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """Return, for each worker that holds the first block, how many leading blocks it holds."""
        ...

    def block_count(self, worker_id: str) -> int:
        """Blocks known to be held by a worker; 0 for an unknown one."""
        ...

    def total_blocks(self) -> int:
        """(worker, block) pairs of all workers."""
        ...

    def staleness_s(self) -> float:
        """Seconds since the index was last known to be up to date; infinity before the first time."""
        ...
