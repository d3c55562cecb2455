"""Linear layers in Triton: right, and to the last bit the same row whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import DEVICE

from kvhive.kernels.linear import linear as checked_linear
from kvhive.kernels.triton.operators import TritonOperators

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TRITON = TritonOperators()
_FULL = torch.full


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Fresh memory holds NaN: what no program writes, or reads before it is written, shows."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: _FULL(shape, torch.nan, **kind))


def layer(rows, inputs, outputs, dtype, biased=True):
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, bias = (each.to(dtype).to(DEVICE) for each in (x, weight * inputs**-0.5, bias))
    return x, weight, bias if biased else None


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "biased"),
    [
        (1, 64, 5, torch.bfloat16, True),
        (3, 100, 200, torch.bfloat16, False),
        (64, 2100, 130, torch.float16, True),
        (65, 1030, 40, torch.bfloat16, True),
        (130, 64, 129, torch.float16, False),
        (20, 2049, 70, torch.float32, True),
        (70, 1025, 30, torch.float32, True),
    ],
)
def test_it_is_a_linear_layer(rows, inputs, outputs, dtype, biased):
    """Rows, inputs and outputs that fill no tile; one piece, and several, side by side or in one program."""
    x, weight, bias = layer(rows, inputs, outputs, dtype, biased)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    actual = TRITON.linear(x, weight, bias)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize(("dtype", "inputs"), [(torch.bfloat16, 2100), (torch.float32, 1100)])
def test_company_changes_no_bit_of_a_row(dtype, inputs):
    """Alone, among few rows (pieces side by side) and among many (in one program, in larger tiles)."""
    x, weight, bias = layer(70, inputs, 40, dtype)
    many = TRITON.linear(x, weight, bias)
    for rows in (slice(0, 1), slice(69, 70), slice(30, 37), slice(0, 64), slice(3, 68)):
        assert torch.equal(TRITON.linear(x[rows], weight, bias), many[rows])


def test_rows_of_a_wider_tensor_and_none_at_all():
    x, weight, bias = layer(6, 96, 40, torch.bfloat16)
    wide = torch.cat((x, x), dim=1)[:, :96]
    assert torch.equal(TRITON.linear(wide, weight, bias), TRITON.linear(x, weight, bias))
    assert torch.equal(TRITON.linear(x.T.contiguous().T, weight, bias), TRITON.linear(x, weight, bias))
    assert TRITON.linear(x[:0], weight, bias).shape == (0, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 7)}, r"need \[rows, inputs\] and \[outputs, inputs\], are \(2, 7\), \(4, 8\)"),
        ({"weight": torch.zeros(8, 4).T}, "weight: needs to be contiguous"),
        ({"bias": torch.zeros(3)}, r"bias: needs \[4\], is \(3,\)"),
        ({"x": torch.zeros(2, 8).bfloat16()}, "need x's torch.bfloat16, have torch.float32"),
        ({"bias": torch.zeros(4).bfloat16()}, "have torch.float32 and torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4)} | change
    with pytest.raises(ValueError, match=message):
        checked_linear(*given.values())
