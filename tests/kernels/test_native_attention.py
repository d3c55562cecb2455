"""Attention in C++: what the reference computes, and a token's bits depend on nothing but its context."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.kernels.reference.operators import ReferenceOperators

REFERENCE = ReferenceOperators()
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Pool:
    """Contexts of random K and V in shuffled blocks; everything else in the pool is NaN."""

    def __init__(self, contexts, kv_heads, head_dim, dtype, block_size=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-context // block_size) for context in contexts]
        blocks = sum(counts) + 2
        self.pool = torch.full((blocks, 2, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        free = random.Random(seed).sample(range(blocks), blocks)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        for context, table in zip(contexts, self.tables, strict=True):
            for position in range(context):
                own = torch.randn(2, kv_heads, head_dim, generator=generator).to(dtype)
                self.pool[table[position // block_size], 1, :, :, position % block_size] = own

    @property
    def layer(self):
        return self.pool[:, 1]

    def attend(self, operators, query, chunks, window=None, softcap=None):
        """chunks: (sequence, queries, context) each; query: their rows, end to end."""
        metadata = attention_metadata(
            self.pool,
            [self.tables[sequence] for sequence, _, _ in chunks],
            [queries for _, queries, _ in chunks],
            [context for _, _, context in chunks],
            (window,),
        )
        return operators.paged_attention(query, self.layer, metadata, 0.2, window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 8, 5), (8, 1, 24, 1), (7, 1, 128, 16), (16, 2, 256, 32), (10, 2, 80, 7)],
)
def test_equals_the_reference_beyond_one_split(native, dtype, heads, kv_heads, head_dim, block_size):
    """Contexts around the borders of tiles (64) and splits (256), decodes and chunks together."""
    shapes = [(1, 1), (1, 64), (1, 65), (1, 256), (1, 257), (5, 530), (70, 300), (64, 64), (1, 700)]
    chunks = [(i, queries, context) for i, (queries, context) in enumerate(shapes)]
    pool = Pool([context for _, context in shapes], kv_heads, head_dim, dtype, block_size)
    torch.manual_seed(1)
    query = torch.randn(sum(queries for queries, _ in shapes), heads, head_dim).to(dtype)
    torch.testing.assert_close(
        pool.attend(native, query, chunks), pool.attend(REFERENCE, query, chunks), **TOLERANCES[dtype]
    )


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (100, None), (300, 5.0), (None, 5.0)])
def test_windows_and_soft_caps_equal_the_reference(native, window, softcap):
    """What lies before the first query's window is NaN."""
    shapes = [(1, 40), (1, 600), (90, 400), (33, 33)]
    chunks = [(i, queries, context) for i, (queries, context) in enumerate(shapes)]
    pool = Pool([context for _, context in shapes], 2, 64, torch.float32)
    torch.manual_seed(1)
    query = torch.randn(sum(queries for queries, _ in shapes), 6, 64) * 4
    expected = pool.attend(REFERENCE, query, chunks, window, softcap)
    for i, queries, context in chunks:
        for position in range(max(0, context - queries + 1 - (window or context))):
            pool.pool[pool.tables[i][position // 16], :, :, :, position % 16] = torch.nan
    torch.testing.assert_close(
        pool.attend(native, query, chunks, window, softcap), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads", [2, 6, 10])
def test_bits_do_not_depend_on_how_a_prompt_was_cut(native, dtype, window, heads):
    """Every token as a decode, in chunks of several sizes, and all at once: the same bits."""
    length, pool = 600, Pool([600, 90], 2, 64, dtype)
    torch.manual_seed(2)
    query = torch.randn(length, heads, 64).to(dtype)
    whole = pool.attend(native, query, [(0, length, length)], window)
    assert not whole.isnan().any()
    for size in (1, 7, 64, 100, 256, 333):
        starts = range(0, length, size if size > 1 else 37)
        for start in starts:
            end = min(start + size, length)
            part = pool.attend(native, query[start:end], [(0, end - start, end)], window)
            assert torch.equal(part, whole[start:end]), (size, start)


def test_bits_do_not_depend_on_batch_mates(native):
    contexts = [700, 12, 33, 300]
    pool = Pool(contexts, 2, 64, torch.float32)
    shapes = [(0, 1, 700), (1, 12, 12), (2, 5, 33), (3, 1, 300), (3, 200, 300)]
    torch.manual_seed(3)
    query = torch.randn(sum(queries for _, queries, _ in shapes), 6, 64)
    together = pool.attend(native, query, shapes)
    starts = [0]
    for _, queries, _ in shapes:
        starts.append(starts[-1] + queries)
    for i, chunk in enumerate(shapes):
        own = pool.attend(native, query[starts[i] : starts[i + 1]], [chunk])
        assert torch.equal(own, together[starts[i] : starts[i + 1]])


@pytest.mark.parametrize("shapes", [[(1, 1500)], [(1, 300)] * 9, [(200, 700), (1, 900)]], ids=str)
def test_bits_do_not_depend_on_threads(native, shapes):
    """One long decode is cut into splits for several threads, and not for one."""
    chunks = [(i, queries, context) for i, (queries, context) in enumerate(shapes)]
    pool = Pool([context for _, context in shapes], 2, 64, torch.float32)
    torch.manual_seed(4)
    query = torch.randn(sum(queries for queries, _ in shapes), 6, 64)
    results = []
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        results.append(pool.attend(native, query, chunks))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_queries_may_be_a_view_beside_keys_and_values(native):
    pool = Pool([50], 2, 16, torch.float32)
    torch.manual_seed(5)
    qkv = torch.randn(9, 4 + 2 + 2, 16)
    view = qkv[:, :4]
    expected = pool.attend(native, view.contiguous(), [(0, 9, 50)])
    assert torch.equal(pool.attend(native, view, [(0, 9, 50)]), expected)


def test_a_sequence_with_nan_spoils_no_other(native):
    pool = Pool([300, 40], 2, 16, torch.float32)
    torch.manual_seed(6)
    query = torch.randn(2, 4, 16)
    before = pool.attend(native, query, [(0, 1, 300), (1, 1, 40)])
    pool.pool[pool.tables[0]] = torch.nan
    after = pool.attend(native, query, [(0, 1, 300), (1, 1, 40)])
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("head_dim", [12, 264])
def test_other_head_dims_are_left_to_the_reference(native, head_dim):
    pool = Pool([20], 1, head_dim, torch.float32)
    torch.manual_seed(7)
    query = torch.randn(1, 2, head_dim)
    expected = pool.attend(REFERENCE, query, [(0, 1, 20)])
    assert torch.equal(pool.attend(native, query, [(0, 1, 20)]), expected)
