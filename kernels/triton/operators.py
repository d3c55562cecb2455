"""The operators in Triton, for CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.fp8_cache import FP8, holds
from kvhive.kernels.philox import NoiseStream, stream_words
from kvhive.kernels.reference.operators import ReferenceOperators
from kvhive.kernels.triton import (
    block_copy,
    gated_activation,
    kv_write,
    linear,
    normalisation,
    rotary,
    row_winner,
    tile_shapes,
)
from kvhive.kernels.triton.attention_plan import Scoring, attention_plan
from kvhive.kernels.triton.decode_attention import decode_attention
from kvhive.kernels.triton.prefill_attention import prefill_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COPIED = (*_DTYPES, torch.uint8)
_MOST_HEAD_DIM = 256
_HEAD_DIM_STEP = 16
"""Head dimensions are multiples of it, so that rows of the pool are read 16 bytes at a time."""


class TritonOperators(ReferenceOperators):
    """Implements Operators. Other dtypes, and shapes that no kernel was made for, go to the reference."""

    name = "triton"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See linear.py."""
        return linear.linear(x, weight, bias) if x.dtype in _DTYPES else super().linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See rms_norm.py."""
        if _normalises(x, weight):
            return normalisation.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rms_norm.py."""
        if _normalises(x, weight) and residual.dtype == x.dtype:
            return normalisation.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        if gate_up.dtype in _DTYPES:
            return gated_activation.gated_activation(gate_up, gelu=False)
        return super().silu_and_mul(gate_up)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        if gate_up.dtype in _DTYPES:
            return gated_activation.gated_activation(gate_up, gelu=True)
        return super().gelu_tanh_and_mul(gate_up)

    def rotary_embedding(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See rotary_embedding.py."""
        if x.dtype in _DTYPES and cos.dtype == torch.float32:
            return rotary.rotary_embedding(x, cos, sin)
        return super().rotary_embedding(x, cos, sin)

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See reshape_and_cache.py."""
        if key.dtype in _DTYPES and _is_layer(pool_layer):
            kv_write.reshape_and_cache(key, value, pool_layer, slot_mapping)
        else:
            super().reshape_and_cache(key, value, pool_layer, slot_mapping)

    def rotary_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool_layer: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See rotary_and_cache.py."""
        if qkv.dtype in _DTYPES and cos.dtype == torch.float32 and _is_layer(pool_layer):
            return rotary.rotary_and_cache(qkv, cos, sin, pool_layer, slot_mapping)
        return super().rotary_and_cache(qkv, cos, sin, pool_layer, slot_mapping)

    def paged_attention(
        self,
        query: torch.Tensor,
        pool_layer: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See paged_attention.py. Sequences with up to MOST_DECODE_QUERIES queries are decodes."""
        known = query.dtype in _DTYPES and holds(pool_layer, query.dtype)
        if not (known and self.records_attention(pool_layer) and scale > 0):
            return super().paged_attention(query, pool_layer, metadata, scale, window, softcap)
        query = query.contiguous()
        output = torch.empty_like(query)
        head_dim = query.shape[2]
        dims, size = tile_shapes.padded_head_dim(head_dim), query.element_size()
        capability = tile_shapes.compute_capability(query.device)
        prefill_tile = tile_shapes.prefill_tile(dims, size, capability, pool_layer.dtype == FP8)
        plan = attention_plan(metadata, query, pool_layer.shape[2], prefill_tile.rows)
        scoring = Scoring.of(scale, window, softcap)
        if plan.decode is not None:
            decode_tile = tile_shapes.decode_tile(dims, size)
            decode_attention(query, pool_layer, plan.decode, scoring, decode_tile, output)
        if plan.prefill is not None:
            prefill_attention(query, pool_layer, plan.prefill, scoring, prefill_tile, output)
        return output

    def records_attention(self, pool_layer: torch.Tensor) -> bool:
        """See Operators: grids depend on shapes, and lengths are read on the device."""
        _, _, _, block_size, head_dim = pool_layer.shape
        fits = head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _MOST_HEAD_DIM
        return fits and pool_layer.dtype in (*_DTYPES, FP8) and block_size & (block_size - 1) == 0

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """See block_copy.py."""
        if pool.dtype in _COPIED and out.device == pool.device:
            block_copy.copy_blocks(pool, out, blocks, None)
        else:
            super().gather_blocks(pool, blocks, out)

    def scatter_blocks(self, staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
        """See block_copy.py."""
        if pool.dtype in _COPIED and staging.device == pool.device:
            block_copy.copy_blocks(staging, pool, None, blocks)
        else:
            super().scatter_blocks(staging, blocks, pool)

    def copy_blocks(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See block_copy.py."""
        if pool.dtype in _COPIED:
            block_copy.copy_blocks(pool, pool, sources, targets)
        else:
            super().copy_blocks(pool, sources, targets)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Operators."""
        return row_winner.greedy(logits) if logits.dtype in _DTYPES else super().greedy(logits)

    def gumbel_argmax(self, scores: torch.Tensor, streams: Sequence[NoiseStream]) -> torch.Tensor:
        """See Operators."""
        return row_winner.gumbel_argmax(scores, stream_words(streams, scores.device))


def _normalises(x: torch.Tensor, weight: torch.Tensor) -> bool:
    known = x.dtype in _DTYPES and weight.dtype in (x.dtype, torch.float32)
    return known and x.shape[-1] <= normalisation.MOST_HIDDEN


def _is_layer(pool_layer: torch.Tensor) -> bool:
    """Whether heads, planes and tokens of a block lie side by side, as in a view of a whole pool."""
    _, _, kv_heads, block_size, head_dim = pool_layer.shape
    width = block_size * head_dim
    return bool(pool_layer.stride()[1:] == (kv_heads * width, width, head_dim, 1))
