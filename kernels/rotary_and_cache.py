"""What happens to a step's Q, K and V between their projection and attention, in one pass."""

from __future__ import annotations

import torch

from kvhive.kernels.fp8_cache import holds
from kvhive.kernels.operators import operators_over


def rotary_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Turn queries and keys by their positions, write K and V into the pool, return Q: [T, heads, head_dim].

    qkv:           [T, heads + 2 * kv_heads, head_dim]: queries, keys, values; may be overwritten
    cos, sin:      [T, head_dim / 2] float32, as in rotary_embedding
    pool_layer:    [blocks, 2, kv_heads, block_size, head_dim], a view `pool[:, layer]`, of qkv's dtype or in
                   eight bits (fp8_cache.py)
    slot_mapping:  [T] int64; slot = block_id * block_size + offset in the block; distinct, inside the pool

    The same as rotary_embedding followed by reshape_and_cache. Raises ValueError when shapes do not fit.
    """
    tokens, heads, head_dim = qkv.shape
    if pool_layer.dim() != 5 or pool_layer.shape[1] != 2 or pool_layer.shape[4] != head_dim:
        raise ValueError(
            f"pool_layer: needs [blocks, 2, kv_heads, block_size, {head_dim}], is {pool_layer.shape}"
        )
    if heads <= 2 * pool_layer.shape[2]:
        raise ValueError(f"qkv: needs more than {2 * pool_layer.shape[2]} heads, has {heads}")
    if not holds(pool_layer, qkv.dtype):
        raise ValueError(f"qkv: needs the pool's {pool_layer.dtype}, is {qkv.dtype}")
    if tuple(cos.shape) != (tokens, head_dim // 2) or cos.shape != sin.shape:
        raise ValueError(
            f"cos, sin: need {(tokens, head_dim // 2)}, are {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"slot_mapping: needs int64 [{tokens}], is {slot_mapping.dtype} {slot_mapping.shape}"
        )
    return operators_over(pool_layer).rotary_and_cache(qkv, cos, sin, pool_layer, slot_mapping)
