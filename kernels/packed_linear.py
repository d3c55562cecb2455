"""Linear layers whose weight was laid out for the machine that reads it."""

from __future__ import annotations

from typing import Protocol

import torch


class PackedLinear(Protocol):
    """y = x Wᵀ + b. Made by Operators.pack_linear."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [rows, out] in x's dtype for x [rows, in] and bias [out] of the same dtype.

        Of the native kernels a row's bits do not depend on how many others are computed with it.
        """
        ...
