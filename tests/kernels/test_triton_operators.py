"""Every operator in Triton equals the reference, and leaves alone what it must not touch."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import DEVICE

from kvhive.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from kvhive.kernels.fp8_cache import FP8
from kvhive.kernels.operators import BACKEND_VARIABLE, operators_for, operators_on
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.reference.operators import ReferenceOperators
from kvhive.kernels.triton.operators import TritonOperators

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STREAMS = [NoiseStream(2**63 + 5, 1, 7), NoiseStream(3, 0, 2**31 + 1), NoiseStream(2**64 - 1, 5, 0)]

# Padding of the interpreter's tiles may overflow where its results are thrown away.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

TRITON, REFERENCE = TritonOperators(), ReferenceOperators()


def equal(actual, expected, ulps=1):
    """Equal to within roundings of the dtype: reductions may be in another order, rsqrt and exp others."""
    tolerance = ulps * {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_the_backend_can_be_asked_for(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    operators_on.cache_clear()
    try:
        x = randn(2, 10)
        assert operators_for(x).name == "triton"
        equal(silu_and_mul(x), REFERENCE.silu_and_mul(x))
        equal(gelu_tanh_and_mul(x), REFERENCE.gelu_tanh_and_mul(x))
        monkeypatch.setenv(BACKEND_VARIABLE, "trition")
        operators_on.cache_clear()
        with pytest.raises(ValueError, match="needs one of auto, reference, native, triton, is 'trition'"):
            operators_for(x)
    finally:
        operators_on.cache_clear()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 100])
def test_norms(hidden, dtype, wide):
    x, residual, weight = (
        randn(3, hidden, dtype=dtype) * 30,
        randn(3, hidden, dtype=dtype),
        randn(hidden, dtype=dtype),
    )
    weight = weight.float() if wide else weight
    equal(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), ulps=4)
    expected = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    normed, total = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected[1])
    equal(normed, expected[0], ulps=4)


def test_norms_of_heads_inside_a_wider_tensor():
    heads, weight = randn(3, 9, 16)[:, 2:6], randn(16)
    equal(TRITON.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6), ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype):
    gate_up = randn(2, 3, 2100, dtype=dtype) * 4
    equal(TRITON.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), ulps=2)
    equal(TRITON.gelu_tanh_and_mul(gate_up), REFERENCE.gelu_tanh_and_mul(gate_up), ulps=2)
    far = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=DEVICE).to(dtype)
    equal(TRITON.silu_and_mul(far), REFERENCE.silu_and_mul(far))
    equal(TRITON.gelu_tanh_and_mul(far), REFERENCE.gelu_tanh_and_mul(far))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 16), (4, 4, 80)])
def test_rotary_and_cache(heads, kv_heads, head_dim, dtype):
    """The pool's other slots and layers are not touched, nor is anything by a negative slot."""
    qkv, angles = randn(4, heads + 2 * kv_heads, head_dim, dtype=dtype), randn(4, head_dim // 2)
    pools = torch.full((2, 5, 2, 2, kv_heads, 16, head_dim), 7.0, dtype=dtype, device=DEVICE)
    slots = torch.tensor([3, 77, 20, 64], device=DEVICE)
    rotation = angles.cos(), angles.sin()
    expected = REFERENCE.rotary_and_cache(qkv.clone(), *rotation, pools[0][:, 1], slots)
    equal(TRITON.rotary_and_cache(qkv.clone(), *rotation, pools[1][:, 1], slots), expected)
    equal(pools[1], pools[0])
    equal(TRITON.rotary_embedding(qkv, *rotation), REFERENCE.rotary_embedding(qkv, *rotation))
    before = pools[1].clone()
    TRITON.rotary_and_cache(qkv.clone(), *rotation, pools[1][:, 1], torch.full_like(slots, -1))
    assert torch.equal(pools[1], before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reshape_and_cache(dtype):
    qkv = randn(3, 30, 24, dtype=dtype)
    key, value = qkv[:, 8:19], qkv.transpose(1, 2).contiguous().transpose(1, 2)[:, 19:]
    pools = torch.full((2, 4, 3, 2, 11, 5, 24), 7.0, dtype=dtype, device=DEVICE)
    slots = torch.tensor([19, 0, 6], device=DEVICE)
    REFERENCE.reshape_and_cache(key, value, pools[0][:, 2], slots)
    TRITON.reshape_and_cache(key, value, pools[1][:, 2], slots)
    assert torch.equal(pools[1], pools[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_of_eight_bits(dtype):
    """What the reference writes: too large numbers, ties, the smallest, NaN; and no other slot."""
    qkv = randn(4, 6, 32, dtype=dtype) * torch.tensor([1.0, 300.0, 0.01, 0.002], device=DEVICE)[:, None, None]
    qkv = qkv.to(dtype)
    qkv[0, 2:, :4] = torch.tensor([17.0, -19.0, torch.nan, 2.0**-10], dtype=dtype)
    angles = torch.zeros(4, 16, device=DEVICE)
    angles[2:] = randn(2, 16)
    pools = torch.full((4, 5, 2, 2, 2, 16, 32), 7.0, device=DEVICE).to(FP8)
    slots, rotation = torch.tensor([3, 77, 20, 64], device=DEVICE), (angles.cos(), angles.sin())
    expected = REFERENCE.rotary_and_cache(qkv.clone(), *rotation, pools[0][:, 1], slots)
    equal(TRITON.rotary_and_cache(qkv.clone(), *rotation, pools[1][:, 1], slots), expected)
    REFERENCE.reshape_and_cache(qkv[:, 2:4], qkv[:, 4:], pools[2][:, 1], slots)
    TRITON.reshape_and_cache(qkv[:, 2:4], qkv[:, 4:], pools[3][:, 1], slots)
    assert torch.equal(pools[3].view(torch.uint8), pools[2].view(torch.uint8))
    turned, wanted = (
        pools[1].float(),
        pools[0].float(),
    )  # one rounding off before may be one off in eight bits
    torch.testing.assert_close(turned, wanted, rtol=0.13, atol=2**-9, equal_nan=True)
    assert pools.float().nan_to_num(0).abs().amax() == 448 and pools[3].float().isnan().sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("width", [24, 5000])
def test_blocks_are_copied(width, dtype):
    pool = torch.randint(0, 100, (6, 3, width), device=DEVICE).to(dtype)
    before, listed = pool.clone(), torch.tensor([4, 1], device=DEVICE)
    staging = torch.zeros_like(pool[:2])
    TRITON.gather_blocks(pool, listed, staging)
    assert torch.equal(staging, before[listed])
    TRITON.scatter_blocks(staging, listed.flip(0), pool)
    TRITON.copy_blocks(pool, listed, torch.tensor([0, 5], device=DEVICE))
    assert torch.equal(pool, before[[1, 4, 2, 3, 1, 4]])
    TRITON.copy_blocks(pool, listed[:0], listed[:0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [11, 9001])
def test_greedy_takes_the_lowest_of_the_largest(vocab_size, dtype):
    logits = randn(4, vocab_size, dtype=dtype)
    logits[1, [3, 7, vocab_size - 1]] = 9.0
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    largest, tokens = TRITON.greedy(logits)
    assert torch.equal(largest, logits.amax(dim=-1)) and largest.dtype == dtype
    assert tokens.tolist() == [int(logits[0].argmax()), 3, 0, 5]


def test_a_row_with_nan_says_so_and_the_others_do_not():
    logits = randn(3, 9001)
    logits[1, 4500] = torch.nan
    largest, tokens = TRITON.greedy(logits)
    assert largest.isnan().tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == logits.argmax(dim=-1)[[0, 2]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_draws_what_the_reference_draws(dtype):
    scores = randn(3, 6001).to(dtype)
    scores[1, 100:] = -torch.inf
    expected = REFERENCE.gumbel_argmax(scores.clone(), STREAMS)
    assert torch.equal(TRITON.gumbel_argmax(scores.clone(), STREAMS), expected)


def test_the_noise_of_every_token_is_the_reference_s():
    """Flat scores but for one token that needs a certain noise to win: all four words of a counter count."""
    scores = torch.full((len(STREAMS), 64), -torch.inf, device=DEVICE)
    for first in range(8):
        scores.fill_(-torch.inf)
        scores[:, first::8] = 0.0
        expected = REFERENCE.gumbel_argmax(scores.clone(), STREAMS)
        assert torch.equal(TRITON.gumbel_argmax(scores.clone(), STREAMS), expected)


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_batches(rows):
    assert TRITON.greedy(randn(rows, 10))[1].shape == (rows,)
    assert TRITON.rms_norm(randn(rows, 10), randn(10), 1e-6).shape == (rows, 10)
    assert TRITON.silu_and_mul(randn(rows, 10)).shape == (rows, 5)
