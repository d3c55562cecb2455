"""Every operator in plain torch: right on any device, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.decoder_layers import FusedLayers, LayerParts, LayersShape
from kvhive.kernels.packed_linear import PackedLinear
from kvhive.kernels.philox import NoiseStream, gumbel_noise
from kvhive.kernels.reference import attention, layers


class ReferenceOperators:
    """Implements Operators (kernels/operators.py); the other implementations extend it."""

    name = "reference"

    def pack_linear(self, weight: torch.Tensor) -> PackedLinear | None:
        """See Operators. Plain torch takes weights as they are."""
        return None

    def fuse_layers(self, layers: Sequence[LayerParts], shape: LayersShape) -> FusedLayers | None:
        """See Operators."""
        return None

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See linear.py."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See rms_norm.py."""
        return layers.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rms_norm.py."""
        total = x + residual
        return layers.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        return layers.silu_and_mul(gate_up)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        return layers.gelu_tanh_and_mul(gate_up)

    def rotary_embedding(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See rotary_embedding.py."""
        return layers.rotary_embedding(x, cos, sin)

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See reshape_and_cache.py."""
        layers.reshape_and_cache(key, value, pool_layer, slot_mapping)

    def rotary_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool_layer: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See rotary_and_cache.py."""
        kv_heads = pool_layer.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        turned = layers.rotary_embedding(qkv[:, : heads + kv_heads], cos, sin)
        query, key = turned.split((heads, kv_heads), dim=1)
        layers.reshape_and_cache(key, qkv[:, heads + kv_heads :], pool_layer, slot_mapping)
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        pool_layer: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See paged_attention.py."""
        return attention.paged_attention(query, pool_layer, metadata, scale, window, softcap)

    def records_attention(self, pool_layer: torch.Tensor) -> bool:
        """See Operators: which rows are gathered is worked out on the host."""
        return False

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """See block_copy.py."""
        torch.index_select(pool, 0, blocks, out=out)

    def scatter_blocks(self, staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
        """See block_copy.py."""
        pool.index_copy_(0, blocks, staging)

    def copy_blocks(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See block_copy.py."""
        pool.index_copy_(0, targets, pool.index_select(0, sources))

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Operators."""
        return logits.amax(dim=-1), logits.argmax(dim=-1)

    def gumbel_argmax(self, scores: torch.Tensor, streams: Sequence[NoiseStream]) -> torch.Tensor:
        """See Operators."""
        return scores.add_(gumbel_noise(scores.shape[1], streams, scores.device)).argmax(dim=-1)
