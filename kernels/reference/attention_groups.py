"""How the reference cuts a ragged batch into calls of dense attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata


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
    """Tokens of the gathered copy that are attended to: the longest context, or what its window leaves."""
    mask: torch.Tensor | None
    """Additive, [batch, 1, 1, length] or [query_length, length]; None where nothing is masked."""
    causal: bool
    """The queries are the whole context and see all before them, so the plain causal mask is right."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All calls of one layer with one window."""

    groups: tuple[AttentionGroup, ...]
    scratch: torch.Tensor
    """Where the pool is gathered into; large enough for every group, so that layers reuse its pages."""


def attention_plan(
    metadata: AttentionMetadata,
    pool_layer: torch.Tensor,
    rows_per_block: int,
    window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Return the plan of a window, worked out for the first layer that asks.

    pool_layer:      [blocks, 2, kv_heads, block_size, head_dim]
    rows_per_block:  pool rows `[block_size * head_dim]` from one block to the next
    """
    if ("reference", window) not in metadata.plans:
        starts = itertools.accumulate(metadata.query_lengths, initial=0)
        tables = metadata.block_tables.tolist()
        batch = zip(tables, starts, metadata.query_lengths, metadata.contexts, strict=False)
        block_size = pool_layer.shape[3]
        spans = [_Span.of(*sequence, window, block_size) for sequence in batch]
        groups = _groups(_Layer(pool_layer, rows_per_block, dtype), window, spans)
        largest = max((group.pool_rows.numel() for group in groups), default=0)
        scratch = pool_layer.new_empty(largest * block_size * pool_layer.shape[4])
        metadata.plans["reference", window] = AttentionPlan(groups, scratch)
    plan: AttentionPlan = metadata.plans["reference", window]
    return plan


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the plan must know of a layer of the pool."""

    view: torch.Tensor
    rows_per_block: int
    dtype: torch.dtype
    """Of queries and masks."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The whole blocks of one sequence that its queries can see."""

    table: Sequence[int]
    start: int
    """Row of the first query."""
    queries: int
    length: int
    """Tokens from the first of these blocks to the context's end."""

    @classmethod
    def of(
        cls,
        table: Sequence[int],
        start: int,
        queries: int,
        context: int,
        window: int | None,
        block_size: int,
    ) -> _Span:
        """Leave out the blocks that lie wholly before the first query's window."""
        oldest = 0 if window is None else max(0, context - queries + 1 - window)
        unseen = oldest // block_size
        seen = table[unseen : -(-context // block_size)]
        return cls(seen, start, queries, context - unseen * block_size)


def _groups(layer: _Layer, window: int | None, spans: Sequence[_Span]) -> tuple[AttentionGroup, ...]:
    """Make one group of each longer chunk, and one of the decodes of each power of two of blocks."""
    decodes: dict[int, list[_Span]] = {}
    groups = []
    for span in spans:
        if span.queries == 1:
            # One group per power of two, so that padding at most doubles what is gathered.
            decodes.setdefault(len(span.table).bit_length(), []).append(span)
        else:
            groups.append(_Group(layer, window, [span]).chunk())
    groups += [_Group(layer, window, members).decode() for members in decodes.values()]
    return tuple(groups)


class _Group:
    """Builds an AttentionGroup from what its sequences see."""

    def __init__(self, layer: _Layer, window: int | None, spans: Sequence[_Span]) -> None:
        self._pool = layer.view
        self._dtype = layer.dtype
        self._window = window
        self._spans = spans
        _, _, self._kv_heads, self._block_size, _ = layer.view.shape
        self._blocks = max(len(span.table) for span in spans)
        # Padding repeats the sequence's own first block: no other sequence's data is ever touched.
        padded = [[*span.table, *[span.table[0]] * (self._blocks - len(span.table))] for span in spans]
        first = torch.tensor(padded)[None, :, None] * layer.rows_per_block
        plane = torch.arange(2)[:, None, None, None] * self._kv_heads
        self._pool_rows = first + plane + torch.arange(self._kv_heads)[None, None, :, None]

    def chunk(self) -> AttentionGroup:
        """One sequence with several queries."""
        (span,) = self._spans
        rows = slice(span.start, span.start + span.queries)
        whole = span.queries == span.length and (self._window is None or self._window >= span.length)
        mask = None
        if not whole:
            positions = torch.arange(span.length - span.queries, span.length)[:, None]
            keys = torch.arange(span.length)[None]
            hidden = keys > positions
            if self._window is not None:
                hidden |= keys <= positions - self._window
            mask = self._additive(hidden)
        return AttentionGroup(
            rows, span.queries, self._device(self._pool_rows), None, span.length, mask, whole
        )

    def decode(self) -> AttentionGroup:
        """Several sequences with one query each."""
        lengths = torch.tensor([span.length for span in self._spans])
        length = max(span.length for span in self._spans)
        past = torch.arange(length)[None] >= lengths[:, None]
        rows, mask, tail = torch.tensor([span.start for span in self._spans]), None, None
        hidden = past
        if self._window is not None:
            hidden = past | (torch.arange(length)[None] < lengths[:, None] - self._window)
        if bool(hidden.any()):
            mask = self._additive(hidden)[:, None, None]
        if bool(past.any()):
            # A row of the copy is (plane, sequence, head, position); what lies past a context's end is
            # another request's leftover, and even times a zero weight a NaN there would be a NaN here.
            width = self._blocks * self._block_size
            grid = torch.arange(2 * len(self._spans) * self._kv_heads * width)
            grid = grid.view(2, len(self._spans), self._kv_heads, width)[..., :length]
            tail = self._device(grid[past[None, :, None].expand_as(grid)])
        return AttentionGroup(self._device(rows), 1, self._device(self._pool_rows), tail, length, mask, False)

    def _additive(self, masked: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(masked.shape, dtype=self._dtype).masked_fill_(masked, -torch.inf)
        return self._device(bias)

    def _device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._pool.device, non_blocking=True)
