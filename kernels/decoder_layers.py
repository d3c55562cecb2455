"""The layers of a decoder as one operator, for implementations that save the way from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer and its bias [out]."""

    layer: PackedLinear
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer. Norms are [hidden]; those that an architecture does not have are None."""

    qkv: Projection
    query_norm: torch.Tensor | None
    """[head_dim]."""
    key_norm: torch.Tensor | None
    output: Projection
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: torch.Tensor | None
    next_norm: torch.Tensor
    """The first norm of the next layer, or the model's last."""
    rope: int
    """Which of the rotary embeddings."""
    window: int | None


@dataclass(frozen=True, slots=True)
class LayersShape:
    """What all layers have in common."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float
    softcap: float | None
    gelu: bool
    """GELU (tanh) for the gate, else SiLU."""


class FusedLayers(Protocol):
    """All layers in one call. Made by Operators.fuse_layers."""

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        pool: torch.Tensor,
        metadata: AttentionMetadata,
        slot_mapping: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the KV of all tokens and return the normed output of the last layer in some rows.

        hidden:        [T, hidden_size], the input after the first layer's norm; overwritten
        residual:      [T, hidden_size], the input; overwritten
        angles:        of each rotary embedding, cosines and sines [T, head_dim / 2] float32
        pool:          [blocks, layers, 2, kv_heads, block_size, head_dim] of hidden's dtype
        slot_mapping:  [T] int64
        rows:          [S] int64, those asked for; where they are few, the last layer computes no others

        Returns [S, hidden_size].
        All contiguous, and one call at a time: memory between the layers is kept. Bit for bit what the
        operators compute one by one. Raises IndexError for a slot outside the pool.
        """
        ...
