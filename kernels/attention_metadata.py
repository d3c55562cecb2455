"""What paged attention must know of a step's batch, computed once and used by every layer.

All lengths are host integers, so that no layer waits for the device to learn a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences that one attention call computes: decodes of similar length, or one longer chunk."""

    query_rows: torch.Tensor | slice
    """Rows of the step's query that belong to the group: [batch] int64, or a slice for one sequence."""
    query_length: int
    pool_rows: torch.Tensor
    """[2, batch, kv_heads, blocks] int64: rows `[block_size * head_dim]` of the pool, K then V."""
    tail_rows: torch.Tensor | None
    """Rows `[head_dim]` of the gathered copy that lie past a context's end; None when there are none."""
    length: int
    """Tokens of the gathered copy that are attended to: the longest context."""
    mask: torch.Tensor | None
    """Additive, [batch, 1, 1, length] or [query_length, length]; None where nothing is masked."""
    causal: bool
    """The queries are the whole context, so the plain causal mask is right."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch, in the order of its queries."""

    groups: tuple[AttentionGroup, ...]
    tokens: int
    rows_per_block: int
    """Pool rows `[block_size * head_dim]` from one block to the next: layers * 2 * kv_heads."""
    scratch: torch.Tensor
    """Where the pool is gathered into; large enough for every group, so that layers reuse its pages."""


def attention_metadata(
    pool: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
) -> AttentionMetadata:
    """Lay out a ragged batch: sequence i asks for the last query_lengths[i] positions of its context.

    pool:             [blocks, layers, 2, kv_heads, block_size, head_dim], contiguous
    block_tables:     block ids that cover positions 0 .. context_lengths[i] - 1
    context_lengths:  tokens whose KV is in the pool by the time of the call, the queries' own included

    Raises ValueError for lengths that contradict each other, a block table that is too short, or a block
    outside the pool.
    """
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            f"pool: needs a contiguous [blocks, layers, 2, kv_heads, block_size, head_dim], is {pool.shape}"
        )
    if not len(block_tables) == len(query_lengths) == len(context_lengths):
        raise ValueError("block_tables, query_lengths, context_lengths: need one entry per sequence")
    blocks, layers, _, kv_heads, block_size, head_dim = pool.shape
    decodes: dict[int, list[int]] = {}
    groups, starts, tokens = [], [], 0
    for index, (table, queries, context) in enumerate(
        zip(block_tables, query_lengths, context_lengths, strict=True)
    ):
        needed = -(-context // block_size)
        if not 0 < queries <= context:
            raise ValueError(f"sequence {index}: {queries} queries do not fit a context of {context}")
        if len(table) < needed or min(table[:needed]) < 0 or max(table[:needed]) >= blocks:
            raise ValueError(
                f"sequence {index}: needs {needed} blocks of a pool of {blocks}, has {list(table)}"
            )
        starts.append(tokens)
        tokens += queries
        if queries == 1:
            # One group per power of two, so that padding at most doubles what is gathered.
            decodes.setdefault(needed.bit_length(), []).append(index)
        else:
            groups.append(_Group(pool, [table], [context]).chunk(slice(tokens - queries, tokens), queries))
    for members in decodes.values():
        group = _Group(pool, [block_tables[i] for i in members], [context_lengths[i] for i in members])
        groups.append(group.decode([starts[i] for i in members]))
    largest = max((group.pool_rows.numel() for group in groups), default=0)
    scratch = torch.empty(largest * block_size * head_dim, dtype=pool.dtype, device=pool.device)
    return AttentionMetadata(tuple(groups), tokens, layers * 2 * kv_heads, scratch)


class _Group:
    """Builds an AttentionGroup from its sequences' block tables and context lengths."""

    def __init__(self, pool: torch.Tensor, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        self._pool = pool
        self._contexts = contexts
        _, layers, _, self._kv_heads, self._block_size, _ = pool.shape
        self._blocks = -(-max(contexts) // self._block_size)
        padded = []
        for table, context in zip(tables, contexts, strict=True):
            own = list(table[: -(-context // self._block_size)])
            # Padding repeats the sequence's own first block: no other sequence's data is ever touched.
            padded.append(own + own[:1] * (self._blocks - len(own)))
        first = torch.tensor(padded)[None, :, None] * (layers * 2 * self._kv_heads)
        plane = torch.arange(2)[:, None, None, None] * self._kv_heads
        self._pool_rows = first + plane + torch.arange(self._kv_heads)[None, None, :, None]

    def chunk(self, query_rows: slice, queries: int) -> AttentionGroup:
        """One sequence with several queries."""
        context = self._contexts[0]
        whole = queries == context
        mask = None
        if not whole:
            positions = torch.arange(context - queries, context)[:, None]
            mask = self._additive(torch.arange(context)[None] > positions)
        return AttentionGroup(query_rows, queries, self._device(self._pool_rows), None, context, mask, whole)

    def decode(self, starts: Sequence[int]) -> AttentionGroup:
        """Several sequences with one query each."""
        length = max(self._contexts)
        past = torch.arange(length)[None] >= torch.tensor(self._contexts)[:, None]
        rows, mask, tail = torch.tensor(starts), None, None
        if bool(past.any()):
            mask = self._additive(past)[:, None, None]
            # A row of the copy is (plane, sequence, head, position); what lies past a context's end is
            # another request's leftover, and even times a zero weight a NaN there would be a NaN here.
            width = self._blocks * self._block_size
            grid = torch.arange(2 * len(starts) * self._kv_heads * width)
            grid = grid.view(2, len(starts), self._kv_heads, width)[..., :length]
            tail = self._device(grid[past[None, :, None].expand_as(grid)])
        return AttentionGroup(self._device(rows), 1, self._device(self._pool_rows), tail, length, mask, False)

    def _additive(self, masked: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(masked.shape, dtype=self._pool.dtype).masked_fill_(masked, -torch.inf)
        return self._device(bias)

    def _device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._pool.device, non_blocking=True)
