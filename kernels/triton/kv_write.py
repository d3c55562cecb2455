"""Keys and values of a step into the pool, as they are or in eight bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton.fp8_cache import as_stored

_HEADS = 8
"""Heads of a token that one program takes."""


@triton.jit(do_not_specialize=["kv_heads"])
def kv_write_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    block_size: tl.tensor,
    kv_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Write some heads of one token. Grid: (tokens, tiles of HEADS heads). A negative slot is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    inside = (head < kv_heads) & (dim < HEAD_DIM) & (slot >= 0)
    key = tl.load(key_ptr + token * key_stride + head * key_head_stride + dim, mask=inside, other=0.0)
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + dim, mask=inside, other=0.0)
    row = slot // block_size * block_stride + slot % block_size * HEAD_DIM
    target = pool_ptr + row + head * (block_size * HEAD_DIM) + dim
    tl.store(target, as_stored(key, pool_ptr), mask=inside)
    tl.store(target + kv_heads * (block_size * HEAD_DIM), as_stored(value, pool_ptr), mask=inside)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See kernels/reshape_and_cache.py. A negative slot is not written."""
    tokens, kv_heads, head_dim = key.shape
    if not key.numel():
        return
    key = key if key.stride(-1) == 1 else key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    kv_write_kernel[(tokens, triton.cdiv(kv_heads, _HEADS))](
        key,
        value,
        pool_layer,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        key.stride(1),
        value.stride(1),
        pool_layer.stride(0),
        pool_layer.shape[3],
        kv_heads,
        HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        num_warps=2,
    )
