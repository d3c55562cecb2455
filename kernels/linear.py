"""A linear layer whose rows do not depend on each other, not even in their last bits."""

from __future__ import annotations

import torch

from kvhive.kernels.operators import operators_for


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b, [rows, outputs]: in Triton every row as it is alone, whatever rows stand beside it.

    x:       [rows, inputs]
    weight:  [outputs, inputs], contiguous, of x's dtype
    bias:    [outputs], of x's dtype

    That costs speed: libraries choose their kernels by the number of rows, and with them the order of sums.
    The other implementations leave it to torch, which promises nothing (docs/performance.md says what was
    seen). Raises ValueError when shapes or dtypes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "x, weight: need [rows, inputs] and [outputs, inputs], are "
            f"{tuple(x.shape)}, {tuple(weight.shape)}"
        )
    if not weight.is_contiguous():
        raise ValueError(f"weight: needs to be contiguous, has strides {weight.stride()}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: needs [{weight.shape[0]}], is {tuple(bias.shape)}")
    if any(each.dtype != x.dtype for each in (weight, bias) if each is not None):
        own = None if bias is None else bias.dtype
        raise ValueError(f"weight, bias: need x's {x.dtype}, have {weight.dtype} and {own}")
    return operators_for(x).linear(x, weight, bias)
