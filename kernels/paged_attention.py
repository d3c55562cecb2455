"""Attention of a ragged batch over keys and values that lie in blocks of a pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvhive.kernels.attention_metadata import AttentionGroup, AttentionMetadata


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
                 metadata was made for, with the queries' own K and V already written
    metadata:    from `attention_metadata`; the same for all layers of a step
    scale:       factor of the scores, usually head_dim ** -0.5
    window:      one of the windows that the metadata was made for
    softcap:     scores become softcap * tanh(score / softcap) before the softmax; above 0

    Query head h reads KV head h // (heads / kv_heads); KV heads are never repeated in memory.
    Uses metadata.scratch, so one metadata must not be used by two calls at once.
    Raises ValueError when shapes do not fit.
    """
    tokens, heads, head_dim = query.shape
    if pool_layer.dim() != 5 or pool_layer.shape[1] != 2 or pool_layer.shape[4] != head_dim:
        raise ValueError(
            f"pool_layer: needs [blocks, 2, kv_heads, block_size, {head_dim}], is {pool_layer.shape}"
        )
    kv_heads = pool_layer.shape[2]
    if tokens != metadata.tokens:
        raise ValueError(f"query: needs {metadata.tokens} tokens, has {tokens}")
    if heads % kv_heads:
        raise ValueError(f"query: {heads} heads are no multiple of {kv_heads} KV heads")
    if window not in metadata.groups:
        raise ValueError(f"window: needs one of {list(metadata.groups)}, is {window}")
    rows = _pool_rows(pool_layer, metadata.rows_per_block)
    output = torch.empty_like(query)
    for group in metadata.groups[window]:
        key, value = _gather(rows, group, metadata.scratch, head_dim)
        if softcap is not None:
            output[group.query_rows] = _softcapped(query[group.query_rows], key, value, group, scale, softcap)
        elif group.query_length == 1:
            output[group.query_rows] = _decode(query[group.query_rows], key, value, group.mask, scale)
        else:
            output[group.query_rows] = _chunk(query[group.query_rows], key, value, group, scale)
    return output


def _pool_rows(pool_layer: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """View one layer as rows `[block_size * head_dim]`, such that one index_select gathers all heads."""
    blocks, _, kv_heads, block_size, head_dim = pool_layer.shape
    width = block_size * head_dim
    if pool_layer.stride() != (rows_per_block * width, kv_heads * width, width, head_dim, 1):
        raise ValueError(f"pool_layer: is not a layer of the metadata's pool, strides {pool_layer.stride()}")
    # The last block's row count stops at this layer's own rows: the view never leaves the pool.
    count = (blocks - 1) * rows_per_block + 2 * kv_heads
    return pool_layer.as_strided((count, width), (width, 1))


def _gather(
    rows: torch.Tensor, group: AttentionGroup, scratch: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a group's K and V out of the pool: two of [batch, kv_heads, length, head_dim]."""
    _, batch, kv_heads, _ = group.pool_rows.shape
    copy = scratch[: group.pool_rows.numel() * rows.shape[1]]
    torch.index_select(rows, 0, group.pool_rows.flatten(), out=copy.view(-1, rows.shape[1]))
    if group.tail_rows is not None:
        copy.view(-1, head_dim).index_fill_(0, group.tail_rows, 0)
    key, value = copy.view(2, batch, kv_heads, -1, head_dim)[..., : group.length, :]
    return key, value


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One query per sequence: the heads that share a KV head stand in for the query axis."""
    batch, heads, head_dim = query.shape
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], head_dim)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).reshape(
        query.shape
    )


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """Several queries of one sequence."""
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=group.mask,
        is_causal=group.causal,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: AttentionGroup,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Either kind of group, score by score: torch's fused attention knows no soft cap."""
    batch, kv_heads, length, head_dim = key.shape
    grouped = query.view(batch, group.query_length, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if group.causal:
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    elif group.mask is not None:
        # [batch, 1, 1, length] or [queries, length], as [batch, kv_heads, group, queries, length] needs it.
        scores = scores + (group.mask[:, None] if group.query_length == 1 else group.mask)
    attended = torch.matmul(scores.softmax(-1).to(value.dtype), value[:, :, None])
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape)
