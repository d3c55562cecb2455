"""A packed linear layer is the same layer."""

from __future__ import annotations

import pytest
import torch

from kvhive.worker.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 8, 33])
def test_packing_changes_nothing_but_the_speed(dtype, biased, rows):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 48), torch.randn(70) if biased else None, torch.randn(rows, 48)
    weight, x = weight.to(dtype), x.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    with torch.inference_mode():
        plain, packed = Linear(weight, bias), Linear(weight, bias)
        packed.pack()
        assert packed(x).shape == (rows, 70)
        close = {"rtol": 2e-2, "atol": 5e-2} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(packed(x), plain(x), **close)
