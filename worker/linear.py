"""A linear layer, with its weight laid out for the CPU where something there reads it faster so."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvhive.kernels.operators import operators_for
from kvhive.kernels.packed_linear import PackedLinear

_TYPICAL_ROWS = 8
"""The batch that oneDNN's layout is tuned for; it serves 1 to 512 rows within about 25 %."""


class Linear:
    """y = x Wᵀ + b.

    On the CPU `pack` lays the weight out once instead of at every call. With the native kernels a row's
    result does not depend on how many others are computed with it; oneDNN and cuBLAS promise nothing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight [out, in] and bias [out]. The weight may still be filled in until `pack`."""
        self._weight = weight
        self._outputs = weight.shape[0]
        self.bias = bias
        self.packed: PackedLinear | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form, where this machine has one for its dtype.

        oneDNN multiplies with the CPU's matrix instructions, but only in bfloat16; in float32 our own kernels
        read less memory and share out the work better.
        """
        if self._weight.device.type != "cpu":
            return
        if self._weight.dtype == torch.bfloat16 and _onednn_packs(torch.bfloat16):
            self.packed = _OneDnnLinear(self._weight)
        elif packed := operators_for(self._weight).pack_linear(self._weight):
            self.packed = packed
        elif _onednn_packs(self._weight.dtype):
            self.packed = _OneDnnLinear(self._weight)
        if self.packed is not None:
            self._weight = self._weight.new_empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] for x [rows, in]."""
        if not x.shape[0]:
            return x.new_empty(0, self._outputs)
        if self.packed is not None:
            return self.packed(x, self.bias)
        return F.linear(x, self._weight, self.bias)


class _OneDnnLinear:
    """Implements PackedLinear."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN is there and has kernels for the dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    mkldnn = torch.ops.mkldnn
    # Internal operators of torch: absent ones mean the plain path, not an error.
    if not (hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
