"""Attention of longer chunks: a tile of rows (queries times the heads of a group) per program.

Keys are taken in tiles that start at multiples of the tile's size, in ascending order, so a row's sums do not
depend on where its chunk begins or ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton.attention_plan import PrefillPlan, Scoring
from kvhive.kernels.triton.attention_tile import add_keys, nothing_seen
from kvhive.kernels.triton.tile_shapes import TileShape, padded_head_dim

_RUNTIME = ["score_scale", "exponent_scale", "window", "block_shift", "group", "table_stride"]
"""Plain numbers that a model or a batch may have any value of: compiled once for all values."""


@triton.jit(do_not_specialize=_RUNTIME)
def prefill_kernel(
    query_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    output_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    score_scale: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    block_shift: tl.tensor,
    group: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Attend from one tile of rows of one KV head. Grid: (tiles, kv_heads)."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile)
    first_row = tl.load(tiles_ptr + tl.num_programs(0) + tile)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    first = tl.load(contexts_ptr + sequence) - queries
    row = first_row + tl.arange(0, ROWS)
    query, head = row // group, kv_head * group + row % group
    dim = tl.arange(0, DIMS)
    wanted = (query < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    place = ((start + query).to(tl.int64) * (tl.num_programs(1) * group) + head) * HEAD_DIM
    q = tl.load(query_ptr + place[:, None] + dim[None, :], mask=wanted, other=0.0)
    head_stride = HEAD_DIM << block_shift
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    plane = tl.num_programs(1) * head_stride
    paged = (pool_ptr + kv_head * head_stride, plane, table, block_stride, block_shift)
    scoring = (score_scale, exponent_scale, window)
    # The window's edge, then what every row sees, which needs no mask, then the causal edge.
    oldest = first + first_row // group
    newest = first + tl.minimum((first_row + ROWS - 1) // group, queries - 1)
    low = tl.maximum(oldest + 1 - window, 0) // KEYS * KEYS
    seen_high = (oldest + 1) // KEYS * KEYS
    seen_low = tl.minimum(tl.cdiv(tl.maximum(newest + 1 - window, 0), KEYS) * KEYS, seen_high)
    limit = first + queries
    at = first + query
    state = nothing_seen(ROWS, DIMS)
    state = add_keys(state, q, at, low, seen_low, limit, paged, scoring, HEAD_DIM, DIMS, KEYS, CAPPED, True)
    state = add_keys(
        state, q, at, seen_low, seen_high, limit, paged, scoring, HEAD_DIM, DIMS, KEYS, CAPPED, False
    )
    total, weight, _ = add_keys(
        state, q, at, seen_high, newest + 1, limit, paged, scoring, HEAD_DIM, DIMS, KEYS, CAPPED, True
    )
    result = (total / weight[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + place[:, None] + dim[None, :], result, mask=wanted)


def prefill_attention(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: PrefillPlan,
    scoring: Scoring,
    tile: TileShape,
    output: torch.Tensor,
) -> None:
    """Write the rows of the plan's sequences into output. Shapes as in kernels/paged_attention.py.

    query, output: contiguous.
    """
    head_dim = query.shape[2]
    _, _, kv_heads, block_size, _ = pool_layer.shape
    prefill_kernel[(plan.tiles.shape[1], kv_heads)](
        query,
        pool_layer,
        output,
        plan.block_tables,
        plan.query_starts,
        plan.context_lengths,
        plan.tiles,
        scoring.score_scale,
        scoring.exponent_scale,
        scoring.window,
        block_size.bit_length() - 1,
        query.shape[1] // kv_heads,
        plan.block_tables.stride(0),
        pool_layer.stride(0),
        HEAD_DIM=head_dim,
        DIMS=padded_head_dim(head_dim),
        ROWS=tile.rows,
        KEYS=tile.keys,
        CAPPED=scoring.capped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
