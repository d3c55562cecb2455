"""How a step's batch is launched: short queries as decodes, longer ones as prefill. Once per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.triton.tile_shapes import SPLIT_TOKENS

MOST_DECODE_QUERIES = 8
"""Sequences with up to so many queries (a token and its drafts) are decodes. By a sequence's own length, so
that its batch mates do not decide how its sums are ordered."""

_SCRATCH_BYTES = 1 << 28
"""Largest scratch for partial results of decodes; what needs more is launched in parts."""

_NO_WINDOW = 1 << 30
"""A window that is longer than any context."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a dot product of query and key becomes a power of two."""

    score_scale: float
    """With a soft cap, the dot product times this goes into its tanh; without one it is unused."""
    exponent_scale: float
    """The dot product, or the tanh, times this is an exponent of 2."""
    window: int
    capped: bool

    @classmethod
    def of(cls, scale: float, window: int | None, softcap: float | None) -> Scoring:
        """Take the arguments of kernels/paged_attention.py; scale is above 0."""
        span = _NO_WINDOW if window is None else min(window, _NO_WINDOW)
        if softcap is None:
            return cls(1.0, scale * _LOG2_E, span, False)
        return cls(scale / softcap, softcap * _LOG2_E, span, True)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Launches of decode attention. Tensors are on the pool's device."""

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    launches: tuple[torch.Tensor, ...]
    """[n] int32 each: the sequences of one launch."""
    most_queries: int
    splits: int
    """Pieces of SPLIT_TOKENS that the widest block table has room for."""
    partial: torch.Tensor
    """Flat float32 scratch for [n, most_queries, heads, splits, head_dim]; launches and layers take turns."""
    logsum: torch.Tensor
    """Likewise, without the head_dim."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Launches of prefill attention. Tensors are on the pool's device."""

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    tiles: torch.Tensor
    """[2, n] int32: the sequence of each tile, and its first row (query times heads of a group)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a shape launch."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None


def attention_plan(
    metadata: AttentionMetadata, query: torch.Tensor, kv_heads: int, prefill_rows: int
) -> AttentionPlan:
    """Return the plan, worked out for the first layer that asks.

    Copies at most two short lists to the device, and nothing at all for a batch of decodes, so that these can
    be captured in a CUDA graph: grids and scratch then follow from the number of sequences, the most queries
    of one, and the width of the block tables.
    """
    _, heads, head_dim = query.shape
    key = ("triton", heads, kv_heads, head_dim, prefill_rows)
    if key not in metadata.plans:
        short = [i for i, count in enumerate(metadata.query_lengths) if count <= MOST_DECODE_QUERIES]
        metadata.plans[key] = AttentionPlan(
            _decode_plan(metadata, short, heads, head_dim),
            _prefill_plan(metadata, heads // kv_heads, prefill_rows),
        )
    plan: AttentionPlan = metadata.plans[key]
    return plan


def _decode_plan(
    metadata: AttentionMetadata, short: list[int], heads: int, head_dim: int
) -> DecodePlan | None:
    if not short:
        return None
    device = metadata.block_tables.device
    most_queries = max(metadata.query_lengths[i] for i in short)
    splits = -(-metadata.block_tables.shape[1] * metadata.block_size // SPLIT_TOKENS)
    pieces = most_queries * heads * splits
    together = max(1, min(len(short), _SCRATCH_BYTES // (4 * pieces * head_dim)))
    if len(short) == len(metadata.query_lengths):
        sequences = torch.arange(len(short), dtype=torch.int32, device=device)
    else:
        sequences = torch.tensor(short, dtype=torch.int32).to(device, non_blocking=True)
    return DecodePlan(
        metadata.block_tables,
        metadata.query_starts,
        metadata.context_lengths,
        tuple(sequences.split(together)),
        most_queries,
        splits,
        torch.empty(together * pieces * head_dim, dtype=torch.float32, device=device),
        torch.empty(together * pieces, dtype=torch.float32, device=device),
    )


def _prefill_plan(metadata: AttentionMetadata, group: int, rows: int) -> PrefillPlan | None:
    tiles = [
        (sequence, first)
        for sequence, count in enumerate(metadata.query_lengths)
        if count > MOST_DECODE_QUERIES
        # Last tiles first: they have the most to read, and end together with what starts after them.
        for first in reversed(range(0, count * group, rows))
    ]
    if not tiles:
        return None
    listed = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    return PrefillPlan(
        metadata.block_tables,
        metadata.query_starts,
        metadata.context_lengths,
        listed.to(metadata.block_tables.device, non_blocking=True),
    )
