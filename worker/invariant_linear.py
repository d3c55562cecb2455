"""A linear layer for `workers.deterministic`: its rows do not depend on the batch, to the last bit."""

from __future__ import annotations

import torch

from kvhive.kernels.linear import linear
from kvhive.worker.linear import Linear


class InvariantLinear(Linear):
    """y = x Wᵀ + b, by the one kernel of kernels/linear.py for all numbers of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight [out, in] and bias [out]. The weight may still be filled in until the first call."""
        self._matrix = weight
        self._added = bias

    def pack(self) -> None:
        """Leave the weight as it is: that kernel reads it so."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] for x [rows, in]."""
        return linear(x, self._matrix, self._added)
