"""Keys and values out of the pool, added to a running softmax: what decode and prefill attention share.

Scores are kept unscaled and scaled by an explicit fused multiply-add, so that a masked and an unmasked tile
round alike and a row's result does not depend on which of them its neighbours needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores: tl.tensor, score_scale: tl.tensor) -> tl.tensor:
    """Return tanh(scores * score_scale) by way of one exponential. scores: float32."""
    return 2.0 / (1.0 + tl.exp2(scores * score_scale * -2.8853900817779268)) - 1.0


@triton.jit
def add_tile(
    scores: tl.tensor,
    value: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    exponent_scale: tl.tensor,
) -> tl.tuple:
    """Return total, weight and largest with one tile added (Milakov and Gimelshein 2018, arXiv 1805.02867).

    scores:  [rows, keys] float32, -Inf where a key is not visible
    value:   [keys, head_dim]
    total:   [rows, head_dim] float32, relative to 2 ** (largest * exponent_scale), as is weight [rows]
    """
    highest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet must not compute Inf - Inf.
    origin = tl.where(highest == -float("inf"), 0.0, highest) * exponent_scale
    fade = tl.exp2(tl.fma(largest, exponent_scale, -origin))
    shares = tl.exp2(tl.fma(scores, exponent_scale, -origin[:, None]))
    weight = weight * fade + tl.sum(shares, 1)
    total = tl.dot(shares.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
    return total, weight, highest


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIMS: tl.constexpr) -> tl.tuple:
    """Return total, weight and largest of rows before their first key."""
    total = tl.zeros([ROWS, DIMS], tl.float32)
    return total, tl.zeros([ROWS], tl.float32), tl.full([ROWS], -float("inf"), tl.float32)


@triton.jit
def add_keys(
    state: tl.tuple,
    q: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    limit: tl.tensor,
    paged: tl.tuple,
    scoring: tl.tuple,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Return the state with the tiles from low, a multiple of KEYS, up to high added.

    state:     total, weight, largest, as of add_tile
    q:         [rows, DIMS]; zeros past HEAD_DIM; at `position` [rows] of the sequence
    limit:     keys from here on are not read
    paged:     address of the KV head's keys in block 0, distance from there to its values, block table,
               distance of blocks, log2 of the block size
    scoring:   as of attention_plan.Scoring: score_scale, exponent_scale, window

    Where not MASKED, the caller knows that every row sees every key.
    """
    total, weight, largest = state
    key_ptr, value_plane, table, block_stride, block_shift = paged
    score_scale, exponent_scale, window = scoring
    dim = tl.arange(0, DIMS)[None, :]
    lane = tl.arange(0, KEYS)
    # The next tile's block ids travel with the loop: loaded in the tile that needs them, they would cost the
    # loads of K and V half of their pipeline.
    block = tl.load(table + ((low + lane) >> block_shift), mask=low + lane < limit, other=0)
    for begin in tl.range(low, high, KEYS):
        token = begin + lane
        offset = block.to(tl.int64) * block_stride + (token & ((1 << block_shift) - 1)) * HEAD_DIM
        place = key_ptr + offset[:, None] + dim
        if MASKED:
            k = tl.load(place, mask=(token < limit)[:, None] & (dim < HEAD_DIM), other=0.0)
            v = tl.load(place + value_plane, mask=(token < limit)[:, None] & (dim < HEAD_DIM), other=0.0)
        elif DIMS != HEAD_DIM:
            k = tl.load(place, mask=dim < HEAD_DIM, other=0.0)
            v = tl.load(place + value_plane, mask=dim < HEAD_DIM, other=0.0)
        else:
            k = tl.load(place)
            v = tl.load(place + value_plane)
        following = token + KEYS
        block = tl.load(table + (following >> block_shift), mask=following < limit, other=0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # from eight bits; others have the type of the queries
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = capped(scores, score_scale)
        if MASKED:
            visible = (token[None, :] <= position[:, None]) & (token[None, :] > position[:, None] - window)
            scores = tl.where(visible & (token < limit)[None, :], scores, -float("inf"))
        total, weight, largest = add_tile(scores, v, total, weight, largest, exponent_scale)
    return total, weight, largest
