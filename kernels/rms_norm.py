"""Root mean square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch

from kvhive.kernels.operators import operators_for


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
    return operators_for(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    x, residual: [..., hidden]; either may be overwritten, so the caller must not use them any more.
    Raises ValueError when shapes do not fit.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual: needs {tuple(x.shape)}, is {tuple(residual.shape)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: needs {tuple(x.shape[-1:])}, is {tuple(weight.shape)}")
    return operators_for(x).add_rms_norm(x, residual, weight, eps)
