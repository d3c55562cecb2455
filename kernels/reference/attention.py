"""Paged attention in plain torch: one gather into scratch, then torch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.fp8_cache import FP8
from kvhive.kernels.reference.attention_groups import AttentionGroup, attention_plan


def paged_attention(
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See kernels/paged_attention.py. KV heads are never repeated in memory."""
    head_dim, eight_bits = query.shape[2], pool_layer.dtype == FP8
    if eight_bits:
        pool_layer = pool_layer.view(torch.uint8)  # gathered as it is, and widened then
    rows_per_block = pool_layer.stride(0) // (pool_layer.shape[3] * head_dim)
    plan = attention_plan(metadata, pool_layer, rows_per_block, window, query.dtype)
    rows = _pool_rows(pool_layer, rows_per_block)
    output = torch.empty_like(query)
    for group in plan.groups:
        key, value = _gather(rows, group, plan.scratch, head_dim)
        if eight_bits:
            key, value = key.view(FP8).to(query.dtype), value.view(FP8).to(query.dtype)
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
