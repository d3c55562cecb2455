"""A linear layer for `workers.deterministic`: its rows do not depend on the batch, to the last bit."""

from __future__ import annotations

import torch

from kvhive.kernels.linear import linear
from kvhive.worker.linear import Linear


class InvariantLinear(Linear):
    """y = x Wᵀ + b, by the one kernel of kernels/linear.py for all numbers of rows."""

    def pack(self) -> None:
        """Leave the weight as it is: that kernel reads it so."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] for x [rows, in]."""
        return linear(x, self._weight, self.bias)
