"""Write the keys and values of a step into the paged pool."""

from __future__ import annotations

import torch

from kvhive.kernels.fp8_cache import holds
from kvhive.kernels.operators import operators_over


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write K and V of T tokens into one layer of the pool, in place.

    key, value:    [T, kv_heads, head_dim], any strides
    pool_layer:    [blocks, 2, kv_heads, block_size, head_dim], a view `pool[:, layer]`, of K's dtype or in
                   eight bits (fp8_cache.py)
    slot_mapping:  [T] int64 on the pool's device; slot = block_id * block_size + offset in the block

    Raises ValueError when shapes or dtypes do not fit. Slots must be distinct and inside the pool; that is
    the caller's promise, because looking would cost a device sync.
    """
    if pool_layer.dim() != 5 or pool_layer.shape[1] != 2:
        raise ValueError(
            f"pool_layer: needs [blocks, 2, kv_heads, block_size, head_dim], is {pool_layer.shape}"
        )
    _, _, kv_heads, _, head_dim = pool_layer.shape
    expected = (slot_mapping.shape[0], kv_heads, head_dim)
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise ValueError(f"key, value: need {expected}, are {tuple(key.shape)} and {tuple(value.shape)}")
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping: needs int64, is {slot_mapping.dtype}")
    if key.dtype != value.dtype or not holds(pool_layer, key.dtype):
        raise ValueError(f"key, value: need the pool's {pool_layer.dtype}, are {key.dtype} and {value.dtype}")
    operators_over(pool_layer).reshape_and_cache(key, value, pool_layer, slot_mapping)
