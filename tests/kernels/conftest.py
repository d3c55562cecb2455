"""What tests of the kernels share."""

from __future__ import annotations

import pytest

from kvhive.kernels.native.operators import NativeOperators, native_operators


@pytest.fixture(scope="session")
def native() -> NativeOperators:
    """The operators in C++; skips where there is no compiler."""
    found = native_operators(required=False)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found
