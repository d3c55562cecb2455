"""Root mean square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension.

    x:       [..., hidden]
    weight:  [hidden]

    Accumulates in float32. A weight of x's dtype is applied after rounding to it, as in Llama; a float32
    weight before, as in Gemma. Returns x's dtype.
    Raises ValueError when the weight does not fit. Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: needs {tuple(x.shape[-1:])}, is {tuple(weight.shape)}")
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    x, residual: [..., hidden]. Raises ValueError when shapes do not fit.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual: needs {tuple(x.shape)}, is {tuple(residual.shape)}")
    total = x + residual
    return rms_norm(total, weight, eps), total
