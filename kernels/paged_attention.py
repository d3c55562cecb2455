"""Attention of a ragged batch over keys and values that lie in blocks of a pool."""

from __future__ import annotations

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.fp8_cache import holds
from kvhive.kernels.operators import operators_over


def paged_attention(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return causal attention of each query over its sequence's context: [T, heads, head_dim].

    query:       [T, heads, head_dim]; each sequence's rows are the last positions of its context
    pool_layer:  [blocks, 2, kv_heads, block_size, head_dim], a view `pool[:, layer]` of the pool that the
                 metadata was made for, with the queries' own K and V already written; of the queries' dtype
                 or in eight bits (fp8_cache.py)
    metadata:    from `attention_metadata`; the same for all layers of a step
    scale:       factor of the scores, usually head_dim ** -0.5
    window:      one of the windows that the metadata was made for
    softcap:     scores become softcap * tanh(score / softcap) before the softmax; above 0

    Query head h reads KV head h // (heads / kv_heads). What lies past a context's end, or before its window,
    is never read. One metadata must not be used by two calls at once. Raises ValueError when shapes do not
    fit.
    """
    tokens, heads, head_dim = query.shape
    if pool_layer.dim() != 5 or pool_layer.shape[1] != 2 or pool_layer.shape[4] != head_dim:
        raise ValueError(
            f"pool_layer: needs [blocks, 2, kv_heads, block_size, {head_dim}], is {pool_layer.shape}"
        )
    _, _, kv_heads, block_size, _ = pool_layer.shape
    if tokens != metadata.tokens:
        raise ValueError(f"query: needs {metadata.tokens} tokens, has {tokens}")
    if not holds(pool_layer, query.dtype):
        raise ValueError(f"query: needs the pool's {pool_layer.dtype}, is {query.dtype}")
    if heads % kv_heads:
        raise ValueError(f"query: {heads} heads are no multiple of {kv_heads} KV heads")
    if window not in metadata.windows:
        raise ValueError(f"window: needs one of {list(metadata.windows)}, is {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: needs a number above 0, is {softcap}")
    width = block_size * head_dim
    if (pool_layer.shape[0], block_size) != (metadata.pool_blocks, metadata.block_size):
        raise ValueError(
            f"pool_layer: is not a layer of the metadata's pool of {metadata.pool_blocks} blocks of"
            f" {metadata.block_size} tokens, is {tuple(pool_layer.shape)}"
        )
    if pool_layer.stride()[1:] != (kv_heads * width, width, head_dim, 1) or pool_layer.stride(0) % width:
        raise ValueError(f"pool_layer: is not a layer of a pool, strides {pool_layer.stride()}")
    return operators_over(pool_layer).paged_attention(query, pool_layer, metadata, scale, window, softcap)
