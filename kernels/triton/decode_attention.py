"""Attention of a few queries per sequence: contexts are cut into pieces of a fixed size, then put together.

Each program of the first kernel reads SPLIT_TOKENS tokens of one KV head for a tile of rows; the second
kernel adds the pieces of each row, always in the same order. Kernels take more than eight parameters because
a launch has no other way to say anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton.attention_plan import DecodePlan, Scoring
from kvhive.kernels.triton.attention_tile import add_keys, nothing_seen
from kvhive.kernels.triton.tile_shapes import SPLIT_TOKENS, TileShape, padded_head_dim

_RUNTIME = [
    *("score_scale", "exponent_scale", "window", "block_shift", "group", "table_stride"),
    *("splits", "most_queries", "heads"),
]
"""Plain numbers that a model or a batch may have any value of: compiled once for all values."""


@triton.jit(do_not_specialize=_RUNTIME)
def decode_split_kernel(
    query_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    logsum_ptr: tl.tensor,
    score_scale: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    block_shift: tl.tensor,
    group: tl.tensor,
    most_queries: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Attend to one piece of one sequence's context, for one tile of rows that share a KV head.

    Grid: (sequences * row tiles, kv_heads, splits). Row tiles lie side by side, so that those after the first
    find the piece in the L2 cache. A piece that no query sees is left unwritten.
    """
    row_tiles = tl.cdiv(group * most_queries, ROWS)
    listed, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences_ptr + listed)
    start, context = tl.load(starts_ptr + sequence), tl.load(contexts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    first = context - queries
    # Tiles start at multiples of KEYS, wherever the window does.
    low = tl.maximum(split * SPLIT, tl.maximum(first + 1 - window, 0) // KEYS * KEYS)
    high = tl.minimum(split * SPLIT + SPLIT, context)
    if (low >= high) | (row_tile * ROWS >= queries * group):
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    query, head = row // group, kv_head * group + row % group
    heads = tl.num_programs(1) * group
    dim = tl.arange(0, DIMS)
    wanted = (query < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    place = ((start + query).to(tl.int64) * heads + head) * HEAD_DIM
    q = tl.load(query_ptr + place[:, None] + dim[None, :], mask=wanted, other=0.0)
    head_stride = HEAD_DIM << block_shift
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    plane = tl.num_programs(1) * head_stride
    paged = (pool_ptr + kv_head * head_stride, plane, table, block_stride, block_shift)
    scoring, state = (score_scale, exponent_scale, window), nothing_seen(ROWS, DIMS)
    total, weight, largest = add_keys(
        state, q, first + query, low, high, high, paged, scoring, HEAD_DIM, DIMS, KEYS, CAPPED, True
    )
    # A row that sees nothing of this piece will not be asked for it.
    piece = ((listed * most_queries + query).to(tl.int64) * heads + head) * tl.num_programs(2) + split
    tl.store(partial_ptr + piece[:, None] * HEAD_DIM + dim[None, :], total / weight[:, None], mask=wanted)
    tl.store(logsum_ptr + piece, largest * exponent_scale + tl.log2(weight), mask=query < queries)


@triton.jit(do_not_specialize=_RUNTIME)
def decode_combine_kernel(
    partial_ptr: tl.tensor,
    logsum_ptr: tl.tensor,
    output_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    window: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    most_queries: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Add the pieces of one head of one query. Grid: (sequences * most_queries, heads).

    Pieces are taken PIECES at a time, from multiples of PIECES on: how many there are changes no sum. A
    sequence without context, such as a captured graph's padding, becomes zeros.
    """
    listed = tl.program_id(0) // most_queries
    query = tl.program_id(0) % most_queries
    head = tl.program_id(1)
    sequence = tl.load(sequences_ptr + listed)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    if query >= queries:
        return
    position = tl.load(contexts_ptr + sequence) - queries + query
    first = tl.maximum(position + 1 - window, 0) // SPLIT
    count = tl.where(position < 0, 0, tl.maximum(position, 0) // SPLIT + 1)
    row = (tl.program_id(0).to(tl.int64) * heads + head) * splits
    dim = tl.arange(0, DIMS)
    total = tl.zeros([DIMS], tl.float32)
    weight = 0.0
    largest = -float("inf")
    for begin in tl.range(first // PIECES * PIECES, count, PIECES):
        piece = begin + tl.arange(0, PIECES)
        present = (piece >= first) & (piece < count)
        logsum = tl.load(logsum_ptr + row + piece, mask=present, other=-float("inf"))
        inside = present[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(partial_ptr + (row + piece)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        highest = tl.maximum(largest, tl.max(logsum, 0))
        fade = tl.exp2(largest - highest)
        share = tl.exp2(logsum - highest)
        total = total * fade + tl.sum(part * share[:, None], 0)
        weight = weight * fade + tl.sum(share, 0)
        largest = highest
    result = tl.where(weight == 0.0, 0.0, total / weight)
    place = ((start + query).to(tl.int64) * heads + head) * HEAD_DIM + dim
    tl.store(output_ptr + place, result.to(output_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


_PIECES = 16
"""Pieces that are added at once: 4096 tokens of context."""


def decode_attention(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: DecodePlan,
    scoring: Scoring,
    tile: TileShape,
    output: torch.Tensor,
) -> None:
    """Write the rows of the plan's sequences into output. Shapes as in kernels/paged_attention.py.

    query, output: contiguous. Grids depend on the plan's padded shapes only, so that a CUDA graph may hold
    the launches. A batch whose pieces would outgrow the scratch is launched in parts.
    """
    for sequences in plan.launches:
        _split(query, pool_layer, plan, scoring, tile, sequences)
        _combine(output, plan, scoring, sequences)


def _split(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: DecodePlan,
    scoring: Scoring,
    tile: TileShape,
    sequences: torch.Tensor,
) -> None:
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = pool_layer.shape
    group = heads // kv_heads
    row_tiles = triton.cdiv(group * plan.most_queries, tile.rows)
    decode_split_kernel[(sequences.shape[0] * row_tiles, kv_heads, plan.splits)](
        query,
        pool_layer,
        plan.block_tables,
        plan.query_starts,
        plan.context_lengths,
        sequences,
        plan.partial,
        plan.logsum,
        scoring.score_scale,
        scoring.exponent_scale,
        scoring.window,
        block_size.bit_length() - 1,
        group,
        plan.most_queries,
        plan.block_tables.stride(0),
        pool_layer.stride(0),
        HEAD_DIM=head_dim,
        DIMS=padded_head_dim(head_dim),
        ROWS=tile.rows,
        KEYS=tile.keys,
        SPLIT=SPLIT_TOKENS,
        CAPPED=scoring.capped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _combine(output: torch.Tensor, plan: DecodePlan, scoring: Scoring, sequences: torch.Tensor) -> None:
    _, heads, head_dim = output.shape
    decode_combine_kernel[(sequences.shape[0] * plan.most_queries, heads)](
        plan.partial,
        plan.logsum,
        output,
        plan.query_starts,
        plan.context_lengths,
        sequences,
        scoring.window,
        heads,
        plan.splits,
        plan.most_queries,
        HEAD_DIM=head_dim,
        DIMS=padded_head_dim(head_dim),
        SPLIT=SPLIT_TOKENS,
        PIECES=_PIECES,
        num_warps=2,
    )
