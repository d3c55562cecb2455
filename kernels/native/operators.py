"""The operators in C++ for the CPU, where a compiler was found."""

from __future__ import annotations

from kvhive.kernels.reference.operators import ReferenceOperators


class NativeOperators(ReferenceOperators):
    """Implements Operators."""

    name = "native"


def native_operators(required: bool) -> NativeOperators | None:
    """Return them, or None on a machine where they cannot be built."""
    return None
