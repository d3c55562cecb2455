"""Linear layers whose weights are packed for the C++ (linear.cpp)."""

from __future__ import annotations

import ctypes

import torch

from kvhive.kernels.native.library import DTYPES, STORED


class NativeLinear:
    """Implements PackedLinear.

    Weights that bfloat16 holds exactly, as most published models have them, take two bytes each, whatever x
    is: decoding is as fast as they are read. Sums are float32 in any case.
    """

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor) -> None:
        """Pack weight: [out, in] float32 or bfloat16, contiguous, on the CPU."""
        self._linear = library.kvhive_linear
        self.outputs, self.inputs = weight.shape
        halved = weight.to(torch.bfloat16)
        self.halves = weight.dtype == torch.bfloat16 or torch.equal(halved.float(), weight)
        size: int = library.kvhive_packed_size(self.halves, self.outputs, self.inputs)
        self._packed = torch.empty(size, dtype=torch.int32 if self.halves else torch.float32)
        pack = library.kvhive_pack_halves if self.halves else library.kvhive_pack_whole
        source = halved if self.halves else weight
        shape = (self.outputs, self.inputs)
        pack(source.data_ptr(), self._packed.data_ptr(), *shape, torch.get_num_threads())
        self.pointer = self._packed.data_ptr()

    @property
    def nbytes(self) -> int:
        """What the packed weight takes."""
        size: int = self._packed.nbytes
        return size

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See PackedLinear."""
        if x.dtype not in STORED or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"x: needs [rows, {self.inputs}] of {STORED}, is {tuple(x.shape)} of {x.dtype}")
        if bias is not None and (bias.dtype != x.dtype or bias.shape != (self.outputs,)):
            raise ValueError(
                f"bias: needs [{self.outputs}] of {x.dtype}, is {tuple(bias.shape)} of {bias.dtype}"
            )
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.outputs)
        self._linear(
            DTYPES[x.dtype],
            self.halves,
            x.data_ptr(),
            self.pointer,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self.inputs,
            self.outputs,
            torch.get_num_threads(),
        )
        return out
