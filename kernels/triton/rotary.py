"""Rotary positions and the KV write, in one kernel that can do either or both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton.fp8_cache import as_stored

_HEADS = 8
"""Heads of a token that one program takes."""


@triton.jit(do_not_specialize=["heads", "output_heads", "kv_heads"])
def rotary_kernel(
    source_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    output_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    block_size: tl.tensor,
    heads: tl.tensor,
    output_heads: tl.tensor,
    kv_heads: tl.tensor,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    CACHES: tl.constexpr,
) -> None:
    """Turn some heads of one token; the first output_heads go to the output, the others into the pool.

    source: [tokens, heads, 2 * HALF]; with CACHES its heads are queries, keys, values, of which values are
    not turned. Grid: (tokens, tiles of HEADS heads). A negative slot is not written.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    inside = (head < heads)[:, None] & (lane < HALF)[None, :]
    place = source_ptr + token * token_stride + head[:, None] * head_stride + lane[None, :]
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + token * HALF + lane, mask=lane < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + lane, mask=lane < HALF, other=0.0)[None, :]
    one, two = first.to(tl.float32), second.to(tl.float32)
    turned_first = (one * cos - two * sin).to(output_ptr.dtype.element_ty)
    turned_second = (two * cos + one * sin).to(output_ptr.dtype.element_ty)
    queries = inside & (head < output_heads)[:, None]
    target = output_ptr + (token * output_heads + head)[:, None] * (2 * HALF) + lane[None, :]
    tl.store(target, turned_first, mask=queries)
    tl.store(target + HALF, turned_second, mask=queries)
    if CACHES:
        slot = tl.load(slots_ptr + token)
        # Keys and values of a block lie one after the other: plane and head are one index.
        plane = head - output_heads
        values = (plane >= kv_heads)[:, None]
        row = slot // block_size * block_stride + slot % block_size * (2 * HALF)
        target = pool_ptr + row + plane.to(tl.int64)[:, None] * (block_size * 2 * HALF) + lane[None, :]
        cached = inside & (plane >= 0)[:, None] & (slot >= 0)
        tl.store(target, as_stored(tl.where(values, first, turned_first), pool_ptr), mask=cached)
        tl.store(target + HALF, as_stored(tl.where(values, second, turned_second), pool_ptr), mask=cached)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels/rotary_embedding.py."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, cos, sin, output, None, None)
    return output


def rotary_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See kernels/rotary_and_cache.py. A negative slot is not written."""
    tokens, heads, head_dim = qkv.shape
    output = torch.empty(
        tokens, heads - 2 * pool_layer.shape[2], head_dim, dtype=qkv.dtype, device=qkv.device
    )
    _launch(qkv, cos, sin, output, pool_layer, slot_mapping)
    return output


def _launch(
    source: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    output: torch.Tensor,
    pool_layer: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim = source.shape
    if not source.numel():
        return
    if source.stride(-1) != 1:
        source = source.contiguous()
    pool = output if pool_layer is None else pool_layer
    lanes = triton.next_power_of_2(head_dim // 2)
    rotary_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        source,
        cos.contiguous(),
        sin.contiguous(),
        output,
        pool,
        cos if slots is None else slots,
        source.stride(0),
        source.stride(1),
        pool.stride(0),
        1 if pool_layer is None else pool_layer.shape[3],
        heads,
        output.shape[1],
        0 if pool_layer is None else pool_layer.shape[2],
        HALF=head_dim // 2,
        LANES=lanes,
        HEADS=_HEADS,
        CACHES=pool_layer is not None,
        num_warps=max(2, lanes // 32),
    )
