"""The small operators in C++ compute what the reference computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvhive.kernels.philox import NoiseStream, gumbel_noise
from kvhive.kernels.reference.operators import ReferenceOperators

REFERENCE = ReferenceOperators()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WIDTHS = pytest.mark.parametrize("width", [1, 8, 13, 48, 576, 1031])


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def close(ours, theirs):
    """Within 1e-5 in float32; in bfloat16 within two of its steps."""
    wide = theirs.dtype != torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if wide else 1.6e-2, atol=1e-6 if wide else 1e-3)


@DTYPES
@WIDTHS
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm(native, dtype, width, wide_weight):
    x = torch.randn(7, width).to(dtype) * 20
    weight = torch.randn(width).to(torch.float32 if wide_weight else dtype)
    close(native.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@DTYPES
def test_rms_norm_of_heads_that_lie_in_wider_rows(native, dtype):
    qkv, weight = torch.randn(5, 8, 24).to(dtype), torch.randn(24).to(dtype)
    for part in (qkv[:, :4], qkv[:, 4:6]):
        close(native.rms_norm(part, weight, 1e-6), REFERENCE.rms_norm(part, weight, 1e-6))


@DTYPES
@WIDTHS
def test_add_rms_norm_leaves_the_sum_in_the_residual(native, dtype, width):
    x, residual, weight = (torch.randn(5, width).to(dtype) for _ in range(3))
    expected = REFERENCE.add_rms_norm(x, residual, weight[0], 1e-5)
    normed, total = native.add_rms_norm(x, residual, weight[0].contiguous(), 1e-5)
    close(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert total is residual


@DTYPES
@WIDTHS
def test_gated_activations(native, dtype, width):
    gate_up = torch.randn(6, 2 * width).to(dtype) * 6
    close(native.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))
    # In float64, because 1 + tanh loses what little is left of a very negative gate.
    close(native.gelu_tanh_and_mul(gate_up), REFERENCE.gelu_tanh_and_mul(gate_up.double()).to(dtype))


def test_activations_are_accurate_over_the_whole_range(native):
    gate = torch.cat((torch.linspace(-90, 90, 20001), torch.tensor([0.0, -200.0, 200.0, 1e30, -1e30])))
    ours = native.silu_and_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0].double()
    exact = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(ours, exact, rtol=4e-7, atol=1e-36)


@DTYPES
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 128])
def test_rotary_and_cache(native, dtype, head_dim):
    """The pool gets what the reference writes, to the bit, and keeps NaN everywhere else."""
    tokens, heads, kv_heads, block_size = 9, 6, 2, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(tokens, head_dim // 2) * 50
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(6 * block_size)[:tokens]
    pools = [torch.full((6, 3, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype) for _ in range(3)]
    theirs = REFERENCE.rotary_and_cache(qkv.clone(), cos, sin, pools[0][:, 1], slots)
    turned = native.rotary_embedding(qkv[:, : heads + kv_heads], cos, sin)
    native.reshape_and_cache(turned[:, heads:], qkv[:, heads + kv_heads :], pools[1][:, 1], slots)
    ours = native.rotary_and_cache(qkv, cos, sin, pools[2][:, 1], slots)
    for query in (ours, turned[:, :heads]):
        assert torch.equal(query, theirs)
    for pool in pools[1:]:
        torch.testing.assert_close(pool, pools[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 24])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(native, slot):
    pool = torch.zeros(6, 1, 2, 1, 4, 8)
    qkv, angles = torch.ones(2, 3, 8), torch.zeros(2, 4)
    slots = torch.tensor([3, slot])
    with pytest.raises(IndexError, match="outside the pool of 24"):
        native.rotary_and_cache(qkv, angles, angles, pool[:, 0], slots)
    with pytest.raises(IndexError, match="outside the pool of 24"):
        native.reshape_and_cache(qkv[:, :1], qkv[:, :1], pool[:, 0], slots)
    assert not pool.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_block_copies(native, dtype):
    pool = torch.randint(0, 100, (7, 2, 3, 5)).to(dtype)
    blocks, targets = torch.tensor([5, 0, 3]), torch.tensor([1, 6, 2])
    out = torch.zeros(3, 2, 3, 5, dtype=dtype)
    native.gather_blocks(pool, blocks, out)
    assert torch.equal(out, pool[blocks])
    copied, scattered = pool.clone(), pool.clone()
    native.copy_blocks(copied, blocks, targets)
    native.scatter_blocks(out, targets, scattered)
    expected = pool.clone()
    expected[targets] = pool[blocks]
    assert torch.equal(copied, expected)
    assert torch.equal(scattered, expected)
    with pytest.raises(IndexError):
        native.gather_blocks(pool, torch.tensor([0, 7, 1]), out)
    with pytest.raises(IndexError):
        native.copy_blocks(pool, blocks, torch.tensor([1, -1, 2]))


def test_a_single_block_of_a_wider_buffer_is_copied_and_no_more(native):
    """The distance to a next block says nothing of the size of the only one."""
    wide = torch.zeros(1, 8)
    native.gather_blocks(torch.ones(4, 4), torch.tensor([2]), wide[:, :4])
    assert wide.tolist() == [[1.0] * 4 + [0.0] * 4]


@DTYPES
@pytest.mark.parametrize("vocab", [1, 7, 64, 1000, 49152])
def test_greedy_finds_the_lowest_of_the_largest(native, dtype, vocab):
    logits = torch.randn(5, vocab).to(dtype)
    logits[1, vocab // 2] = logits[1, vocab - 1] = 50
    logits[2] = -torch.inf
    largest, tokens = native.greedy(logits)
    assert torch.equal(largest, logits.amax(-1))
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_greedy_reports_nan(native):
    logits = torch.randn(3, 5000)
    logits[0, 4321] = torch.nan
    logits[1, 0] = torch.inf
    largest, tokens = native.greedy(logits)
    assert largest[0].isnan()
    assert (largest[1].item(), tokens[1].item()) == (torch.inf, 0)
    assert torch.equal(largest[2], logits[2].max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [3, 130, 20003])
@pytest.mark.parametrize("threads", [1, 3])
def test_gumbel_argmax_draws_the_reference_tokens(native, dtype, vocab, threads):
    """Flat rows, where every token's noise counts, peaked ones, and ones with few tokens left."""
    torch.set_num_threads(threads)
    scores = torch.randn(40, vocab, dtype=dtype) * torch.tensor([0.1, 4.0, 0.0, 1.0] * 10)[:, None]
    scores[3::4, : vocab // 2] = -torch.inf
    streams = [NoiseStream(2**64 - 1 - i * 12345678901234567, i % 3, 1000 * i) for i in range(40)]
    noisy = scores + gumbel_noise(vocab, streams, scores.device)
    tokens = native.gumbel_argmax(scores.clone(), streams)
    best = noisy.amax(-1)
    won = noisy.gather(1, tokens[:, None])[:, 0]
    assert (best - won).max() <= 4e-6
    assert (tokens == noisy.argmax(-1)).float().mean() > 0.97


def test_gumbel_argmax_refuses_a_seed_of_too_many_bits(native):
    with pytest.raises(ValueError, match="seed: needs 64 bits"):
        native.gumbel_argmax(torch.zeros(1, 8), [NoiseStream(1 << 64, 0, 0)])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_alone_and_among_many(native, threads):
    torch.set_num_threads(threads)
    x, weight = torch.randn(400, 576), torch.randn(576)
    assert torch.equal(native.rms_norm(x, weight, 1e-5)[7:8], native.rms_norm(x[7:8], weight, 1e-5))
    assert torch.equal(native.silu_and_mul(x)[7:8], native.silu_and_mul(x[7:8]))
    normed, _ = native.add_rms_norm(x, x.clone(), weight, 1e-5)
    alone, _ = native.add_rms_norm(x[7:8].clone(), x[7:8].clone(), weight, 1e-5)
    assert torch.equal(normed[7:8], alone)


def test_what_it_does_not_know_is_left_to_the_reference(native):
    """float16, float64 logits, rows that are not dense, nothing at all."""
    half = torch.randn(4, 16).half()
    assert torch.equal(native.silu_and_mul(half), REFERENCE.silu_and_mul(half))
    assert torch.equal(native.rms_norm(half, half[0], 1e-5), REFERENCE.rms_norm(half, half[0], 1e-5))
    sparse = torch.randn(16, 4).T
    assert torch.equal(native.silu_and_mul(sparse), REFERENCE.silu_and_mul(sparse))
    wide = torch.randn(3, 9).double()
    assert torch.equal(native.greedy(wide)[1], wide.argmax(-1))
    assert native.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
