"""Runs the Triton kernels of a test on the CUDA device where there is one, else in Triton's interpreter.

Import it before the kernels: triton reads the variable that chooses its interpreter as it is imported. The
interpreter computes with the bit patterns of bfloat16 numbers, truncates where a device rounds (and in eight
bits loses what is carried into the exponent), has products whose rounding depends on a row's place, and asks
numpy for what numpy 2.4 refuses: mended here. Where there is no triton, the importing tests are skipped.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    # Libraries that use no kernel have imported it all the same: once more, then, but for its compiled parts.
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]

pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


def _widened(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (data.astype(np.uint32) << 16).view(np.float32)


def _rounded(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """To bfloat16's bits, to nearest even."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)


def _mend() -> None:
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    cast, patch_tensor = builder.cast_impl, interpreter._patch_lang_tensor
    fp_to_fp = builder.create_fp_to_fp

    def create_dot(self, a, b, total, *_):
        # In float64: a BLAS rounds a row of float32 by where in the matrix it stands, a tensor core does not.
        wide = [_widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)]
        product = np.matmul(*(x.astype(np.float64) for x in wide)) + total.data
        return handle(product.astype(total.data.dtype), total.dtype.scalar)

    def cast_impl(self, source, target_type):
        source_type, target = source.dtype.scalar, target_type.scalar
        if source_type == tl.float32 and target == tl.bfloat16:
            return handle(_rounded(source.data), tl.bfloat16)
        if source_type == tl.bfloat16 and target == tl.float32:
            return handle(_widened(source.data), tl.float32)
        return cast(self, source, target_type)

    def create_fp_to_fp(self, source, target_type, rounding_mode):
        if source.dtype.scalar == tl.float32 and target_type.scalar == tl.float8e4nv:
            eight_bits = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return handle(eight_bits.view(torch.uint8).numpy(), tl.float8e4nv)
        return fp_to_fp(self, source, target_type, rounding_mode)

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.create_fp_ext = builder.create_fp_trunc = cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor


if DEVICE == "cpu":
    _mend()
