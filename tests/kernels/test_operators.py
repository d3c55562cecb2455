"""Who computes is chosen by device and environment, and what cannot be had is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvhive.kernels.operators import BACKEND_VARIABLE, operators_on


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    operators_on.cache_clear()
    yield
    operators_on.cache_clear()


def test_plain_torch_computes_where_nothing_else_is_made_for_the_device() -> None:
    assert operators_on("meta").name == "reference"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plain_torch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    assert operators_on(device).name == "reference"


def test_native_kernels_are_refused_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "native")
    with pytest.raises(RuntimeError, match="native kernels are for the CPU, not for cuda"):
        operators_on("cuda")


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "blas")
    with pytest.raises(ValueError, match="needs one of auto, reference, native, triton, is 'blas'"):
        operators_on("cpu")
