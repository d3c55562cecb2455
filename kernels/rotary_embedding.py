"""Rotary position embedding in the "rotate half" layout: element i is paired with i + head_dim / 2."""

from __future__ import annotations

import torch

from kvhive.kernels.operators import operators_for


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x rotated by the angle of each token's position.

    x:         [T, heads, head_dim]; query and key heads may be passed side by side
    cos, sin:  [T, head_dim / 2] float32, of position * inverse frequency

    Computes in float32 and returns x's dtype. Raises ValueError when shapes do not fit.
    Source: Su et al. 2021, arXiv 2104.09864; the layout is Hugging Face's.
    """
    tokens, _, head_dim = x.shape
    if tuple(cos.shape) != (tokens, head_dim // 2) or cos.shape != sin.shape:
        raise ValueError(
            f"cos, sin: need {(tokens, head_dim // 2)}, are {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    return operators_for(x).rotary_embedding(x, cos, sin)
