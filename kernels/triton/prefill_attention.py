"""Attention of longer chunks: a tile of rows (queries times the heads of a group) per program.

Keys are taken in tiles that start at multiples of the tile's size, in ascending order, so a row's sums do not
depend on where its chunk begins or ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton.attention_plan import PrefillPlan, Scoring
from kvhive.kernels.triton.attention_tile import add_tile, capped
from kvhive.kernels.triton.tile_shapes import padded_head_dim, prefill_tile

_RUNTIME = [
    *("score_scale", "exponent_scale", "window", "block_shift", "group", "kv_heads"),
    *("table_stride", "tile_count"),
]
"""Plain numbers that a model or a batch may have any value of: compiled once for all values."""


@triton.jit
def _add_keys(
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    context: tl.tensor,
    table: tl.tensor,
    key_ptr: tl.tensor,
    value_plane: tl.tensor,
    block_stride: tl.tensor,
    block_shift: tl.tensor,
    score_scale: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys of [low, high), a multiple of KEYS each; where not MASKED, every row sees all of them."""
    dim = tl.arange(0, DIMS)
    lane = tl.arange(0, KEYS)
    block = tl.load(table + ((low + lane) >> block_shift), mask=low + lane < context, other=0)
    for begin in tl.range(low, high, KEYS):
        token = begin + lane
        offset = block.to(tl.int64) * block_stride + (token & ((1 << block_shift) - 1)) * HEAD_DIM
        place = key_ptr + offset[:, None] + dim[None, :]
        if MASKED:
            present = (token < context)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(place, mask=present, other=0.0)
            v = tl.load(place + value_plane, mask=present, other=0.0)
        elif DIMS != HEAD_DIM:
            k = tl.load(place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(place + value_plane, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(place)
            v = tl.load(place + value_plane)
        # As in the decode kernel: the next tile's block ids travel with the loop.
        following = token + KEYS
        block = tl.load(table + (following >> block_shift), mask=following < context, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = capped(scores, score_scale)
        if MASKED:
            visible = (token[None, :] <= position[:, None]) & (token[None, :] > position[:, None] - window)
            scores = tl.where(visible & (token < context)[None, :], scores, -float("inf"))
        total, weight, largest = add_tile(scores, v, total, weight, largest, exponent_scale)
    return total, weight, largest


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
    kv_heads: tl.tensor,
    tile_count: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Attend from one tile of rows of one KV head. Grid: (tiles, kv_heads)."""
    # ---- where
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles_ptr + tl.program_id(0))
    first_row = tl.load(tiles_ptr + tile_count + tl.program_id(0))
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    context = tl.load(contexts_ptr + sequence)
    # ---- queries
    row = first_row + tl.arange(0, ROWS)
    query = row // group
    head = kv_head * group + row % group
    dim = tl.arange(0, DIMS)
    wanted = (query < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    place = ((start + query).to(tl.int64) * query_stride + head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(query_ptr + place, mask=wanted, other=0.0)
    position = context - queries + query
    # ---- keys and values: the window's edge, what every row sees, the causal edge
    oldest = context - queries + first_row // group
    newest = context - queries + tl.minimum((first_row + ROWS - 1) // group, queries - 1)
    low = tl.maximum(oldest + 1 - window, 0) // KEYS * KEYS
    plain_high = (oldest + 1) // KEYS * KEYS
    plain_low = tl.minimum(tl.cdiv(tl.maximum(newest + 1 - window, 0), KEYS) * KEYS, plain_high)
    high = newest + 1
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    head_stride = HEAD_DIM << block_shift
    key_ptr = pool_ptr + kv_head * head_stride
    value_plane = kv_heads * head_stride
    total = tl.zeros([ROWS, DIMS], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    for phase in tl.static_range(3):
        begin = low if phase == 0 else (plain_low if phase == 1 else plain_high)
        end = plain_low if phase == 0 else (plain_high if phase == 1 else high)
        total, weight, largest = _add_keys(
            total,
            weight,
            largest,
            q,
            position,
            begin,
            end,
            context,
            table,
            key_ptr,
            value_plane,
            block_stride,
            block_shift,
            score_scale,
            exponent_scale,
            window,
            HEAD_DIM,
            DIMS,
            KEYS,
            CAPPED,
            phase != 1,
        )
    result = total / weight[:, None]
    tl.store(output_ptr + place, result.to(output_ptr.dtype.element_ty), mask=wanted)


def prefill_attention(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: PrefillPlan,
    scoring: Scoring,
    output: torch.Tensor,
) -> None:
    """Write the rows of the plan's sequences into output. Shapes as in kernels/paged_attention.py.

    query, output: contiguous.
    """
    head_dim = query.shape[2]
    _, _, kv_heads, block_size, _ = pool_layer.shape
    dims = padded_head_dim(head_dim)
    tile = prefill_tile(dims, pool_layer.element_size())
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
        kv_heads,
        plan.tiles.shape[1],
        query.stride(0),
        pool_layer.stride(0),
        plan.block_tables.stride(0),
        HEAD_DIM=head_dim,
        DIMS=dims,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CAPPED=scoring.capped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
