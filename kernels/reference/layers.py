"""Normalisation, rotary positions, activations and cache writes in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvhive.kernels.fp8_cache import FP8, to_fp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels/rms_norm.py."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels/rotary_embedding.py."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See kernels/activation.py."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See kernels/activation.py."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See kernels/reshape_and_cache.py."""
    block_size = pool_layer.shape[3]
    blocks = slot_mapping // block_size
    offsets = slot_mapping % block_size
    if pool_layer.dtype == FP8:  # which torch stores by index as plain bytes only
        pool_layer = pool_layer.view(torch.uint8)
        key, value = to_fp8(key).view(torch.uint8), to_fp8(value).view(torch.uint8)
    pool_layer[blocks, 0, :, offsets] = key
    pool_layer[blocks, 1, :, offsets] = value
