"""The operators in Triton, for CUDA devices."""

from __future__ import annotations

from kvhive.kernels.reference.operators import ReferenceOperators


class TritonOperators(ReferenceOperators):
    """Implements Operators."""

    name = "triton"
