"""Keys and values of eight bits: written to the nearest, read as they were written, refused elsewhere."""

from __future__ import annotations

import pytest
import torch

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvhive.kernels.fp8_cache import FP8, to_fp8
from kvhive.kernels.paged_attention import paged_attention
from kvhive.kernels.reshape_and_cache import reshape_and_cache
from kvhive.kernels.rotary_and_cache import rotary_and_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_numbers_become_the_nearest_ones_and_none_becomes_nan():
    """Every number of eight bits stays itself; between two of them the nearer one is taken, the even one in a
    tie; past the largest there is the largest."""
    all_bits = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = all_bits[~all_bits.isnan()].unique()
    assert torch.equal(to_fp8(numbers).float(), numbers)
    middle = (numbers[1:] + numbers[:-1]) / 2
    assert torch.equal(
        to_fp8(middle * (1 + 1e-4) + 1e-9).float(), numbers[1:].where(middle > -1e-9, numbers[:-1])
    )
    assert to_fp8(torch.tensor([17.0, 19.0])).float().tolist() == [16.0, 20.0]
    assert to_fp8(torch.tensor([449.0, -1e30, torch.inf])).float().tolist() == [448.0, -448.0, 448.0]
    assert to_fp8(torch.tensor([torch.nan])).float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_its_slots_and_nothing_else(dtype):
    pool = torch.full((4, 3, 2, 2, 5, 8), 7.0).to(FP8)
    key, value = torch.randn(2, 3, 2, 8, dtype=dtype)
    slots = torch.tensor([19, 0, 7])
    reshape_and_cache(key, value, pool[:, 1], slots)
    expected = torch.full((4, 3, 2, 2, 5, 8), 7.0)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 5, 1, 0, :, slot % 5] = to_fp8(key[token]).float()
        expected[slot // 5, 1, 1, :, slot % 5] = to_fp8(value[token]).float()
    assert torch.equal(pool.float(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 3.0)])
def test_attention_is_that_over_what_was_written(dtype, window, softcap):
    """To the bit what attention gives over a wide pool of the same numbers; what is not written is NaN."""
    batch, heads, kv_heads, head_dim = [(1, 30), (1, 5), (7, 40), (12, 12)], 4, 2, 16
    eight, wide = (
        torch.full((12, 2, 2, kv_heads, 16, head_dim), torch.nan).to(kind) for kind in (FP8, dtype)
    )
    tables, free = [], iter([7, 2, 11, 0, 5, 9, 1, 3])
    for _, context in batch:
        table = [next(free) for _ in range(-(-context // 16))]
        slots = torch.tensor([table[i // 16] * 16 + i % 16 for i in range(context)])
        key, value = torch.randn(2, context, kv_heads, head_dim, dtype=dtype)
        reshape_and_cache(key, value, eight[:, 1], slots)
        reshape_and_cache(to_fp8(key).to(dtype), to_fp8(value).to(dtype), wide[:, 1], slots)
        tables.append(table)
    query = torch.randn(sum(count for count, _ in batch), heads, head_dim, dtype=dtype)
    outputs = []
    for pool in (eight, wide):
        metadata = attention_metadata(pool, tables, *map(list, zip(*batch, strict=True)), (window,))
        outputs.append(paged_attention(query, pool[:, 1], metadata, 0.3, window, softcap))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # the wide pool may have another implementation
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


def test_blocks_move_as_they_are():
    pool = torch.randn(6, 2, 2, 1, 16, 8).to(FP8)
    before, listed, staging = pool.float(), torch.tensor([4, 1]), torch.empty(2, 2, 2, 1, 16, 8).to(FP8)
    gather_blocks(pool, listed, staging)
    assert torch.equal(staging.float(), before[[4, 1]])
    scatter_blocks(staging, listed.flip(0), pool)
    copy_blocks(pool, listed, torch.tensor([0, 5]))
    assert torch.equal(pool.float(), before[[1, 4, 2, 3, 1, 4]])


def test_rotary_writes_the_turned_keys():
    qkv, angles, slots = torch.randn(3, 6, 16), torch.randn(3, 8), torch.tensor([3, 0, 17])
    eight, wide = torch.zeros(2, 1, 2, 2, 16, 16).to(FP8), torch.zeros(2, 1, 2, 2, 16, 16)
    rotation = angles.cos(), angles.sin()
    queries = rotary_and_cache(qkv.clone(), *rotation, eight[:, 0], slots)
    torch.testing.assert_close(queries, rotary_and_cache(qkv.clone(), *rotation, wide[:, 0], slots))
    torch.testing.assert_close(eight.float(), to_fp8(wide).float(), rtol=0.13, atol=0)


def test_other_dtypes_still_have_to_be_the_pool_s():
    pool, half = torch.zeros(2, 1, 2, 2, 16, 16), torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    metadata = attention_metadata(pool, [[0]], [1], [1])
    with pytest.raises(ValueError, match=r"query: needs the pool's torch\.float32, is torch\.bfloat16"):
        paged_attention(half, pool[:, 0], metadata, 1.0)
    with pytest.raises(ValueError, match=r"key, value: need the pool's torch\.float32"):
        reshape_and_cache(half, half, pool[:, 0], torch.tensor([0]))
