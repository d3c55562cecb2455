"""Paged attention equals plain attention in float64 over the same tokens laid end to end."""

from __future__ import annotations

import random

import pytest
import torch

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.kernels.paged_attention import paged_attention
from kvhive.kernels.reshape_and_cache import reshape_and_cache

LAYERS = 3


def plain_attention(query, key, value, scale, window=None, softcap=None):
    """query [Q, H, D] are the last positions of key, value [L, KV, D]; everything in float64."""
    queries, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    group = heads // kv_heads
    scores = torch.einsum("qhd,lhd->hql", query, key.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions, keys = torch.arange(length - queries, length)[:, None], torch.arange(length)[None]
    allowed = (keys <= positions) & (keys > positions - (window or length))
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, value.repeat_interleave(group, 1))


def filled_pool(contexts, kv_heads, block_size, head_dim, dtype, layer, poison):
    """A pool with every context's K and V in shuffled blocks of one layer, and `poison` everywhere else."""
    counts = [-(-context // block_size) for context in contexts]
    blocks = sum(counts) + 3
    pool = torch.full((blocks, LAYERS, 2, kv_heads, block_size, head_dim), poison, dtype=dtype)
    free = random.Random(1).sample(range(blocks), blocks)
    tables, keys, values = [], [], []
    for context, count in zip(contexts, counts, strict=True):
        table = [free.pop() for _ in range(count)]
        key, value = torch.randn(2, context, kv_heads, head_dim, dtype=dtype)
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(context)])
        reshape_and_cache(key, value, pool[:, layer], slots)
        tables.append(table)
        keys.append(key)
        values.append(value)
    return pool, tables, keys, values


BATCHES = {
    "one decode": [(1, 1)],
    "decodes of all lengths": [(1, n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 100)],
    "equal decodes": [(1, 32), (1, 32)],
    "whole prompts": [(2, 2), (37, 37)],
    "resumed chunks": [(2, 3), (5, 40), (16, 32), (31, 64)],
    "all together": [(7, 7), (1, 20), (3, 50), (1, 90), (1, 3), (48, 48)],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_equals_plain_attention_and_never_reads_what_is_not_its_own(batch, heads, kv_heads, block_size):
    """Everything in the pool but the contexts' own tokens is NaN: one read of it would show."""
    torch.manual_seed(0)
    head_dim, layer = 8, 1
    contexts = [context for _, context in batch]
    pool, tables, keys, values = filled_pool(
        contexts, kv_heads, block_size, head_dim, torch.float32, layer, torch.nan
    )
    queries = [torch.randn(count, heads, head_dim) for count, _ in batch]
    metadata = attention_metadata(pool, tables, [count for count, _ in batch], contexts)
    output = paged_attention(torch.cat(queries), pool[:, layer], metadata, 0.3)
    expected = [
        plain_attention(q.double(), k.double(), v.double(), 0.3)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (7, None), (16, 2.0), (64, None), (None, 2.0)])
def test_windows_and_soft_caps_equal_plain_attention(batch, window, softcap):
    """Blocks before a window are not even gathered: NaN in them does not show."""
    torch.manual_seed(0)
    contexts = [context for _, context in batch]
    pool, tables, keys, values = filled_pool(contexts, 3, 5, 8, torch.float32, 1, torch.nan)
    for (count, context), table in zip(batch, tables, strict=True):
        oldest = max(0, context - count + 1 - (window or context))
        pool[table[: oldest // 5]] = torch.nan
    queries = [torch.randn(count, 9, 8) * 3 for count, _ in batch]
    metadata = attention_metadata(pool, tables, [count for count, _ in batch], contexts, (None, window))
    output = paged_attention(torch.cat(queries), pool[:, 1], metadata, 0.3, window, softcap)
    expected = [
        plain_attention(q.double(), k.double(), v.double(), 0.3, window, softcap)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_what_lies_outside_a_window_weighs_exactly_nothing():
    """A token in a gathered block but before the window changes no bit, however large it is."""
    torch.manual_seed(0)
    batch, window = [(1, 30), (4, 30), (30, 30)], 6
    contexts = [context for _, context in batch]
    pool, tables, _, _ = filled_pool(contexts, 2, 16, 8, torch.float32, 0, torch.nan)
    query = torch.randn(sum(count for count, _ in batch), 4, 8)
    metadata = attention_metadata(pool, tables, [count for count, _ in batch], contexts, (window,))
    before = paged_attention(query, pool[:, 0], metadata, 0.3, window)
    pool[tables[0][1], :, :, :, :8] = 1e30  # positions 16 to 23, of which the window leaves 24 to 29
    pool[tables[1][1], :, :, :, :5] = 1e30  # four queries from 26 on see 21 to 29
    after = paged_attention(query, pool[:, 0], metadata, 0.3, window)
    assert torch.equal(before, after)


def test_a_window_that_the_metadata_does_not_know_is_refused():
    pool = torch.zeros(2, 1, 2, 1, 4, 8)
    metadata = attention_metadata(pool, [[0]], [1], [3], (5,))
    with pytest.raises(ValueError, match=r"window: needs one of \[5\], is None"):
        paged_attention(torch.zeros(1, 1, 8), pool[:, 0], metadata, 1.0)
    with pytest.raises(ValueError, match="windows: need"):
        attention_metadata(pool, [[0]], [1], [3], (0,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype):
    torch.manual_seed(0)
    batch = BATCHES["all together"]
    contexts = [context for _, context in batch]
    pool, tables, keys, values = filled_pool(contexts, 2, 16, 64, dtype, 0, 1e4)
    queries = [torch.randn(count, 4, 64, dtype=dtype) for count, _ in batch]
    metadata = attention_metadata(pool, tables, [count for count, _ in batch], contexts)
    output = paged_attention(torch.cat(queries), pool[:, 0], metadata, 0.125)
    expected = [
        plain_attention(q.double(), k.double(), v.double(), 0.125)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), rtol=2e-2, atol=2e-2)


def test_a_sequence_does_not_depend_on_its_batch_mates():
    torch.manual_seed(0)
    contexts = [70, 12, 33]
    pool, tables, _, _ = filled_pool(contexts, 2, 16, 16, torch.float32, 2, torch.nan)
    query = torch.randn(3, 4, 16)
    together = paged_attention(query, pool[:, 2], attention_metadata(pool, tables, [1, 1, 1], contexts), 0.25)
    for i, context in enumerate(contexts):
        alone = attention_metadata(pool, tables[i : i + 1], [1], [context])
        own = paged_attention(query[i : i + 1], pool[:, 2], alone, 0.25)
        torch.testing.assert_close(together[i : i + 1], own, rtol=1e-5, atol=1e-6)


def test_block_tables_may_be_longer_than_the_context():
    """A scheduler may have allocated ahead; the extra blocks are not looked at, not even for their range."""
    pool = torch.zeros(2, 1, 2, 1, 4, 8)
    assert attention_metadata(pool, [[1, 0, 99]], [1], [5]).tokens == 1


@pytest.mark.parametrize(
    ("tables", "queries", "contexts", "message"),
    [
        ([[0]], [1], [5], "needs 2 blocks"),
        ([[0, 2]], [1], [5], "needs 2 blocks of a pool of 2"),
        ([[0, -1]], [1], [5], "needs 2 blocks of a pool of 2"),
        ([[0]], [3], [2], "3 queries do not fit a context of 2"),
        ([[0]], [0], [2], "0 queries do not fit"),
        ([[0]], [1, 1], [2], "one entry per sequence"),
    ],
)
def test_contradictions_are_refused(tables, queries, contexts, message):
    with pytest.raises(ValueError, match=message):
        attention_metadata(torch.zeros(2, 1, 2, 1, 4, 8), tables, queries, contexts)


def test_a_pool_layer_of_another_pool_is_refused():
    pool = torch.zeros(2, 3, 2, 1, 4, 8)
    metadata = attention_metadata(pool, [[0]], [1], [3])
    with pytest.raises(ValueError, match="not a layer of the metadata's pool"):
        paged_attention(torch.zeros(1, 1, 8), torch.zeros(1, 2, 1, 4, 8), metadata, 1.0)
    with pytest.raises(ValueError, match="needs 1 tokens, has 2"):
        paged_attention(torch.zeros(2, 1, 8), pool[:, 0], metadata, 1.0)
    with pytest.raises(ValueError, match="no multiple"):
        pool = torch.zeros(2, 3, 2, 2, 4, 8)
        paged_attention(torch.zeros(1, 3, 8), pool[:, 0], attention_metadata(pool, [[0]], [1], [3]), 1.0)
