"""A step's batch in one buffer: what each part holds, with and without padding, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.worker.decode_graphs import graph_sizes
from kvhive.worker.model_runner import Chunk
from kvhive.worker.pool_size import blocks_that_fit
from kvhive.worker.step_inputs import StepInputs, StepShape

BLOCK = 4
POOL = torch.zeros(64, 1, 2, 1, BLOCK, 8)


def chunks_of(spans: list[tuple[int, int, int]], rng: np.random.Generator) -> list[Chunk]:
    """Chunks of (start, tokens, drafts) with random ids in random blocks of the first 60."""
    made = []
    for start, count, drafts in spans:
        blocks = rng.permutation(60)[: -(-(start + count + drafts) // BLOCK) + 1].tolist()
        tokens = rng.integers(0, 100, count + drafts).tolist()
        made.append(Chunk(tokens[:count], start, blocks, None, drafts=tokens[count:]))
    return made


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_every_token_has_its_position_and_slot(spans, padding, seed):
    """Checked token by token against the chunks; padding writes to the spare block and reads one token."""
    chunks = chunks_of(spans, np.random.default_rng(seed))
    inputs = StepInputs(POOL, (None,), spare_block=63)
    total = sum(count + drafts for _, count, drafts in spans)
    shape = None
    if padding:
        shape = StepShape(total + padding, 2 + padding, len(spans) + padding, 20)
    batch = inputs.lay_out(chunks, [0, total - 1], shape)
    starts = batch.attention.query_starts.tolist()
    for index, chunk in enumerate(chunks):
        tokens = [*chunk.token_ids, *chunk.drafts]
        own = slice(starts[index], starts[index + 1])
        positions = range(chunk.start, chunk.start + len(tokens))
        assert batch.token_ids[own].tolist() == tokens
        assert batch.positions[own].tolist() == list(positions)
        slots = [chunk.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        assert batch.slot_mapping[own].tolist() == slots
        needed = -(-positions.stop // BLOCK)
        table = batch.attention.block_tables[index].tolist()
        assert table[:needed] == chunk.block_table[:needed] and set(table[needed:]) <= {table[0]}
        assert batch.attention.context_lengths[index] == batch.attention.contexts[index] == positions.stop
        assert batch.attention.query_lengths[index] == len(tokens)
    assert batch.logit_rows.tolist()[:2] == [0, total - 1]
    assert batch.slot_mapping[total:].tolist() == [63 * BLOCK] * padding
    assert batch.attention.contexts[len(chunks) :] == [1] * padding
    assert batch.attention.tokens == len(batch.token_ids) == starts[-1]


def test_a_batch_of_one_shape_stays_where_it_is():
    """A CUDA graph reads the addresses that it was recorded with."""
    inputs = StepInputs(POOL, (None,), spare_block=63)
    shape = StepShape(4, 4, 4, 10)
    first = inputs.lay_out([], [], shape)
    rng = np.random.default_rng(0)
    second = inputs.lay_out(chunks_of([(7, 1, 0), (30, 1, 0)], rng), range(2), shape)
    for name in ("token_ids", "positions", "slot_mapping", "logit_rows"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    for name in ("block_tables", "query_starts", "context_lengths"):
        assert getattr(first.attention, name).data_ptr() == getattr(second.attention, name).data_ptr()


@pytest.mark.parametrize(
    ("table", "message"),
    [([1], "needs 2 blocks, has"), ([0, 64], "leaves a pool of 64"), ([0, -1], "leaves")],
)
def test_blocks_that_are_missing_or_outside_the_pool_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        StepInputs(POOL, (None,)).lay_out([Chunk([1] * 5, 0, table, None)], [])


def test_graphs_cover_the_largest_batch_and_pad_little():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(16) == (1, 2, 4, 8, 16)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(1000)[-2:] == (224, 256)
    for batch in range(33, 257):
        size = next(size for size in graph_sizes(256) if size >= batch)
        assert size < 1.5 * batch


def test_the_pool_gets_what_is_left_and_no_room_names_every_number():
    assert blocks_that_fit(total=1000, utilization=0.9, others=100, peak=300, block_bytes=7) == 500 // 7
    with pytest.raises(Exception, match=r"90% of 10.0 GiB .* 8.0 GiB for the model .* 1.0 GiB that others"):
        blocks_that_fit(10 * 2**30, 0.9, 2**30, 8 * 2**30, 1)
