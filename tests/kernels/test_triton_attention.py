"""Attention in Triton equals plain attention in float64, row by row whatever stands beside or before it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from triton_interpreter import DEVICE

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.kernels.fp8_cache import FP8, to_fp8
from kvhive.kernels.triton.attention_plan import MOST_DECODE_QUERIES
from kvhive.kernels.triton.operators import TritonOperators

LAYERS = 2
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(1, 1), (12, 12), (3, 50), (9, 70)]

# What no query sees has no sum: the device computes NaN and throws it away, numpy warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)


class Case:
    """A pool with the contexts of a batch in shuffled blocks of one layer, and NaN everywhere else."""

    def __init__(
        self,
        batch,
        heads=2,
        kv_heads=1,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
        seed=0,
        spread=1.0,
        eight_bits=False,
    ):
        torch.manual_seed(seed)
        self.batch, self.block_size = batch, block_size
        counts = [-(-context // block_size) for _, context in batch]
        blocks = sum(counts) + 3
        pool = torch.full((blocks, LAYERS, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        free = random.Random(seed).sample(range(blocks), blocks)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.keys, self.values = [], []
        for (_, context), table in zip(batch, self.tables, strict=True):
            key, value = torch.randn(2, context, kv_heads, head_dim, dtype=dtype)
            if eight_bits:
                key, value = to_fp8(key).to(dtype), to_fp8(value).to(dtype)
            tokens = torch.arange(context)
            own = torch.tensor(table)[tokens // block_size]
            pool[own, 1, 0, :, tokens % block_size] = key
            pool[own, 1, 1, :, tokens % block_size] = value
            self.keys.append(key)
            self.values.append(value)
        self.pool = (pool.to(FP8) if eight_bits else pool).to(DEVICE)
        self.queries = [torch.randn(count, heads, head_dim, dtype=dtype) * spread for count, _ in batch]

    def run(self, members=None, window=None, softcap=None, rows=slice(None)):
        """Attend for some sequences, and of each for some of its last positions."""
        members = range(len(self.batch)) if members is None else members
        queries = [self.queries[i][rows] for i in members]
        ends = [self.batch[i][1] - self.batch[i][0] + len(self.queries[i][: rows.stop]) for i in members]
        metadata = attention_metadata(
            self.pool, [self.tables[i] for i in members], [len(q) for q in queries], ends, (window,)
        )
        query = torch.cat(queries).to(DEVICE)
        output = TritonOperators().paged_attention(query, self.pool[:, 1], metadata, 0.3, window, softcap)
        return output.cpu()

    def expected(self, window=None, softcap=None):
        outputs = []
        for (count, context), query, key, value in zip(
            self.batch, self.queries, self.keys, self.values, strict=True
        ):
            group = query.shape[1] // key.shape[1]
            wide_key, wide_value = (x.double().repeat_interleave(group, 1) for x in (key, value))
            scores = torch.einsum("qhd,lhd->hql", query.double(), wide_key) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            positions, tokens = torch.arange(context - count, context)[:, None], torch.arange(context)
            seen = (tokens <= positions) & (tokens > positions - (window or context))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hql,lhd->qhd", weights, wide_value))
        return torch.cat(outputs)

    def check(self, **options):
        tolerance = ROUNDING[self.queries[0].dtype]
        torch.testing.assert_close(
            self.run(**options).double(), self.expected(**options), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, torch.bfloat16) for head_dim in (64, 80, 96, 128, 256)),
        *((head_dim, torch.float32) for head_dim in (64, 96, 256)),
        (128, torch.float16),
    ],
)
def test_every_head_dimension_and_dtype(head_dim, dtype):
    Case(MIXED, head_dim=head_dim, dtype=dtype, spread=0.2).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keys_and_values_of_eight_bits(dtype):
    """Against the numbers that eight bits hold: all that was lost was lost in writing."""
    case = Case(MIXED, heads=4, kv_heads=2, head_dim=64, dtype=dtype, spread=0.2, eight_bits=True)
    assert case.pool.dtype == FP8
    case.check()
    case.check(window=7, softcap=2.0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (7, 1), (20, 1)])
def test_heads_that_share_keys(heads, kv_heads):
    Case([(1, 5), (3, 20), (9, 20)], heads, kv_heads).check()


@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_block_sizes_that_are_powers_of_two(block_size):
    Case(MIXED, block_size=block_size).check()


@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (16, 5)])
def test_what_no_kernel_was_made_for_is_computed_all_the_same(head_dim, block_size):
    Case(MIXED, head_dim=head_dim, block_size=block_size).check()


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (7, None), (33, 2.0), (64, None), (None, 2.0)])
def test_windows_and_soft_caps(window, softcap):
    """Blocks that lie wholly before a window are not read: NaN in them does not show."""
    case = Case([(1, 1), (12, 12), (3, 50), (40, 150), (1, 150)], spread=3.0)
    expected = case.expected(window, softcap)
    for (count, context), table in zip(case.batch, case.tables, strict=True):
        oldest = max(0, context - count + 1 - (window or context))
        # Tiles are longer than blocks: what is masked in a tile's first block is read, but weighs nothing.
        whole = oldest // 64 * 64 // case.block_size
        case.pool[table[:whole]] = torch.nan
    actual = case.run(window=window, softcap=softcap)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_contexts_of_several_pieces():
    """Past 256 tokens a decode is put together from pieces; past 4096 these from groups of them."""
    Case([(1, 256), (2, 257), (1, 513)], heads=1).check()
    Case([(1, 300), (4, 600)], heads=1, spread=3.0).check(window=270)
    Case([(1, 4150)], heads=1).check()


@pytest.mark.parametrize(
    ("window", "dtype", "eight_bits"),
    [(None, torch.bfloat16, False), (20, torch.float32, False), (None, torch.bfloat16, True)],
)
def test_batch_mates_change_no_bit(dtype, window, eight_bits):
    batch = [(1, 1), (12, 12), (3, 50), (9, 70), (8, 270)]
    case = Case(batch, heads=1, dtype=dtype, eight_bits=eight_bits)
    together = case.run(window=window).split([count for count, _ in case.batch])
    for i, own in enumerate(together):
        assert torch.equal(case.run([i], window=window), own)
    for i, own in enumerate(together[:4]):
        assert torch.equal(case.run([4, i], window=window)[8:], own)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 2.0)])
def test_where_a_chunk_ends_changes_no_bit(window, softcap):
    """A prompt in chunks of whatever lengths, but for those short enough to be decodes."""
    case = Case([(90, 120)], heads=3)
    whole = case.run(window=window, softcap=softcap)
    for borders in ([0, 9, 90], [0, 40, 53, 90]):
        parts = [
            case.run(window=window, softcap=softcap, rows=slice(start, stop))
            for start, stop in itertools.pairwise(borders)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_drafts_change_no_bit_of_the_tokens_before_them():
    """A token that is verified among its drafts has the result that it has alone."""
    case = Case([(MOST_DECODE_QUERIES, 260)], heads=3)
    together = case.run()
    for i in range(0, MOST_DECODE_QUERIES, 3):
        assert torch.equal(case.run(rows=slice(i, i + 1)), together[i : i + 1])


def test_nothing_but_its_own_sequence_knows_of_a_broken_query():
    """A NaN stays in its own row, and does stay: it is not mistaken for a sequence without context."""
    case = Case(MIXED)
    fine = case.run()
    case.queries[2][1, 0] = torch.nan
    broken = case.run()
    row = 1 + 12 + 1  # the middle one of three queries of the third sequence
    assert broken[row, 0].isnan().all()
    fine[row, 0], broken[row, 0] = 0, 0
    assert torch.equal(fine, broken)


def test_padding_without_context_becomes_zeros():
    """A captured batch has rows to spare: their context is 0, and they read nothing."""
    case = Case([(1, 20), (1, 3)])
    metadata = attention_metadata(case.pool, case.tables, [1, 1], [20, 3])
    metadata.context_lengths[1] = 0
    query = torch.cat(case.queries).to(DEVICE)
    output = TritonOperators().paged_attention(query, case.pool[:, 1], metadata, 0.3, None, None).cpu()
    assert torch.equal(output[:1], case.run([0]))
    assert torch.equal(output[1], torch.zeros_like(output[1]))


def test_a_batch_that_outgrows_the_scratch_is_launched_in_parts(monkeypatch):
    case = Case([(1, 30), (5, 300), (1, 17), (1, 64)])
    expected = case.run()
    monkeypatch.setattr("kvhive.kernels.triton.attention_plan._SCRATCH_BYTES", 1)
    assert torch.equal(case.run(), expected)
