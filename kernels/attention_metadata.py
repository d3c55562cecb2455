"""What paged attention must know of a step's batch, computed once and used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch, in the order of its queries. Tensors are on the pool's device."""

    block_tables: torch.Tensor
    """[B, most blocks] int32; beyond a sequence's last block its first one stands again."""
    query_starts: torch.Tensor
    """[B + 1] int32: the rows of sequence i are query_starts[i] .. query_starts[i + 1] - 1."""
    context_lengths: torch.Tensor
    """[B] int32: tokens whose KV is in the pool by the time of the call, the queries' own included."""
    query_lengths: Sequence[int]
    """These and the next on the host, so that no layer waits for the device to learn a shape."""
    contexts: Sequence[int]
    tokens: int
    pool_blocks: int
    block_size: int
    windows: tuple[int | None, ...]
    """The sliding windows that the model's layers have; None is attention to the whole context."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)
    """What an implementation has worked out for the first layer that asked, and keeps for the others."""


def each_alone(metadata: AttentionMetadata, rows: torch.Tensor) -> AttentionMetadata:
    """Return the batch in which some rows [S] int64 are sequences of their own that see what they saw."""
    starts, contexts = metadata.query_starts.long(), metadata.context_lengths.long()
    owners = torch.searchsorted(starts, rows, right=True) - 1
    seen = contexts[owners] - (starts[owners + 1] - rows) + 1
    count = len(rows)
    return AttentionMetadata(
        block_tables=metadata.block_tables[owners],
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
        context_lengths=seen.int(),
        query_lengths=[1] * count,
        contexts=seen.tolist(),
        tokens=count,
        pool_blocks=metadata.pool_blocks,
        block_size=metadata.block_size,
        windows=metadata.windows,
    )


def attention_metadata(
    pool: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    windows: Sequence[int | None] = (None,),
) -> AttentionMetadata:
    """Lay out a ragged batch: sequence i asks for the last query_lengths[i] positions of its context.

    pool:             [blocks, layers, 2, kv_heads, block_size, head_dim], contiguous
    block_tables:     block ids that cover positions 0 .. context_lengths[i] - 1
    context_lengths:  tokens whose KV is in the pool by the time of the call, the queries' own included
    windows:          the sliding windows that the model's layers have, None for layers without one; a query
                      sees itself and the window - 1 tokens before it

    Raises ValueError for lengths that contradict each other, a block table that is too short, a block
    outside the pool, or a window below 1.
    """
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            f"pool: needs a contiguous [blocks, layers, 2, kv_heads, block_size, head_dim], is {pool.shape}"
        )
    if not len(block_tables) == len(query_lengths) == len(context_lengths):
        raise ValueError("block_tables, query_lengths, context_lengths: need one entry per sequence")
    if not windows or any(window is not None and window < 1 for window in windows):
        raise ValueError(f"windows: need at least one, each None or above 0, are {list(windows)}")
    tables = _used_blocks(pool, block_tables, query_lengths, context_lengths)
    widest = max(map(len, tables), default=0)
    padded = np.array([[*table, *[table[0]] * (widest - len(table))] for table in tables], dtype=np.int32)
    starts = np.array([0, *itertools.accumulate(query_lengths)], dtype=np.int32)

    def on_device(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(pool.device, non_blocking=True)

    return AttentionMetadata(
        block_tables=on_device(padded.reshape(len(tables), widest)),
        query_starts=on_device(starts),
        context_lengths=on_device(np.array(context_lengths, dtype=np.int32)),
        query_lengths=query_lengths,
        contexts=context_lengths,
        tokens=int(starts[-1]),
        pool_blocks=pool.shape[0],
        block_size=pool.shape[4],
        windows=tuple(dict.fromkeys(windows)),
    )


def _used_blocks(
    pool: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
) -> list[Sequence[int]]:
    """Cut each table to the blocks of its context, having checked all three."""
    blocks, block_size = pool.shape[0], pool.shape[4]
    used = []
    for index, (table, queries, context) in enumerate(
        zip(block_tables, query_lengths, context_lengths, strict=True)
    ):
        needed = -(-context // block_size)
        if not 0 < queries <= context:
            raise ValueError(f"sequence {index}: {queries} queries do not fit a context of {context}")
        own = table[:needed]
        if len(own) < needed or min(own) < 0 or max(own) >= blocks:
            raise ValueError(
                f"sequence {index}: needs {needed} blocks of a pool of {blocks}, has {list(table)}"
            )
        used.append(own)
    return used
