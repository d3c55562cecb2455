"""Packed linear layers in C++: right, and the same bits alone and in company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Outputs and inputs: below, at and above a panel, a vector, a group of inputs; and a model's.
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (16, 8), (70, 1500), (17, 33), (576, 1536)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


def tolerance(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of sums of that many terms, each rounded in float32; bfloat16 rounds the result once more."""
    largest = float((x.double().abs() @ weight.double().abs().t()).max())
    return largest * (x.shape[1] * 2**-24 if x.dtype == torch.float32 else 2**-8)


@SHAPES
@DTYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("halves", [False, True], ids=["any weights", "weights that bfloat16 holds"])
def test_against_float64(native, shape, dtype, biased, halves):
    weight, x = torch.randn(shape), torch.randn(23, shape[1]).to(dtype)
    weight = weight.bfloat16().to(dtype) if halves else weight.to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    y = native.pack_linear(weight)(x, bias)
    assert y.dtype == dtype
    assert (y.double() - exact(x, weight, bias)).abs().max() <= tolerance(x, weight) + 2**-8 * biased


@SHAPES
@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_in_any_company(native, shape, dtype, threads):
    weight, x = torch.randn(shape).to(dtype), torch.randn(230, shape[1]).to(dtype)
    torch.set_num_threads(1)
    layer = native.pack_linear(weight)
    together = layer(x, None)
    torch.set_num_threads(threads)
    for rows in (*range(1, 14), 25, 96, 97, 200):
        assert torch.equal(layer(x[20 : 20 + rows], None), together[20 : 20 + rows]), rows


def test_both_ways_to_pack_give_the_same_bits(native):
    weight, x = torch.randn(100, 300).bfloat16(), torch.randn(9, 300)
    halved = native.pack_linear(weight.float())
    whole = native.pack_linear(torch.cat((weight.float(), torch.full((1, 300), 1 / 3))))
    assert halved.nbytes * 2 <= whole.nbytes
    assert torch.equal(halved(x, None), whole(x, None)[:, :100])


def test_infinities_and_nan_come_through_where_they_belong(native):
    weight, x = torch.ones(40, 20), torch.ones(3, 20)
    x[1, 4], weight[7, 3] = torch.inf, torch.nan
    y = native.pack_linear(weight)(x, None)
    assert torch.isnan(y[:, 7]).all()
    assert torch.isinf(y[1, :7]).all()
    assert (y[0, :7] == 20).all()


def test_rows_that_are_not_dense(native):
    weight, x = torch.randn(33, 16), torch.randn(5, 32)[:, ::2]
    torch.testing.assert_close(native.pack_linear(weight)(x, None), x @ weight.t())


def test_what_it_does_not_know_is_left_to_others(native):
    assert native.pack_linear(torch.randn(4, 4, dtype=torch.float16)) is None
    assert native.pack_linear(torch.randn(4, 8)[:, ::2]) is None
    assert native.pack_linear(torch.empty(0, 4)) is None
