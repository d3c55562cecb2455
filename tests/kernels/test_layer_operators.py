"""Norm, rotary embedding and activation equal transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kvhive.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from kvhive.kernels.rms_norm import add_rms_norm, rms_norm
from kvhive.kernels.rotary_embedding import rotary_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_transformers(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(5, 48, dtype=dtype) * 30
    with torch.no_grad():
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float32_weight_is_applied_before_rounding_as_in_gemma(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # seconds, for this test alone

    torch.manual_seed(0)
    norm = Gemma3RMSNorm(48, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(5, 48, dtype=dtype) * 30
    with torch.no_grad():
        assert torch.equal(rms_norm(x, norm.weight + 1, 1e-5), norm(x))


def test_add_rms_norm_is_the_sum_and_its_norm():
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = x + residual
    normed, total = add_rms_norm(x, residual, weight, 1e-5)  # may overwrite either
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-5))


def test_rotary_embedding_equals_transformers():
    torch.manual_seed(0)
    query, key = torch.randn(7, 6, 16), torch.randn(7, 2, 16)
    angles = torch.randint(0, 5000, (7, 1)).float() * torch.rand(8)
    turned = rotary_embedding(torch.cat((query, key), 1), angles.cos(), angles.sin())
    wide = torch.cat((angles, angles), -1)[None]
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], wide.cos(), wide.sin()
    )
    torch.testing.assert_close(turned, torch.cat(expected, 1)[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_silu_and_mul_takes_the_gate_first():
    gate, up = torch.randn(2, 3, 8).unbind()
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), expected)


def test_gelu_and_mul_is_the_tanh_approximation():
    gate, up = torch.randn(2, 3, 8).unbind()
    expected = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(gelu_tanh_and_mul(torch.cat((gate, up), -1)), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5),
        lambda: add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5),
        lambda: rotary_embedding(torch.zeros(2, 1, 8), torch.zeros(2, 8), torch.zeros(2, 8)),
        lambda: silu_and_mul(torch.zeros(2, 7)),
        lambda: gelu_tanh_and_mul(torch.zeros(2, 7)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match="need"):
        call()
