"""The runner's greedy output equals transformers' on the same weights, however the work is cut up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.model_runner import Chunk, ChunkResult
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 256
NEW_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)

TEXT = """The committee met again on Thursday to discuss the bridge. Its three spans had been closed since the
flood, and the farmers on the far bank now drove forty miles to reach the mill. An engineer from the county
showed photographs of the piers: two were sound, he said, and the third had shifted by the width of a hand.
Nobody asked what it would cost until the miller did, and then nobody spoke. In 1921 the same bridge had been
built in eleven weeks by nineteen men, a steam crane and a mule. def total(items): return sum(i.price for i in
items) Einstein's relativity says that clocks in motion run slow. La rivière était haute et le pont fermé. """

PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 31, 48, 63, 100, 129, 257, 600)


@dataclass
class Sequence:
    """What the tiny loop below keeps of a request."""

    tokens: list[int]
    goal: int
    table: list[int] = field(default_factory=list)
    computed: int = 0


def drive(runner, prompts, new_tokens, rng, chunk_limit=97, shared=None, free=None):
    """Generate greedily for all prompts at once: random odd chunks, prefills and decodes in one batch.

    `shared` gives sequences blocks whose KV is already there: the first len(blocks) * BLOCK_SIZE tokens.
    Returns each prompt's new tokens; frees nothing, so that tables can be inspected by the caller.
    """
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) if free is None else free
    sequences = [Sequence(list(prompt), len(prompt) + new_tokens) for prompt in prompts]
    for sequence in sequences:
        sequence.table = list(shared or [])
        sequence.computed = len(sequence.table) * BLOCK_SIZE
    while active := [sequence for sequence in sequences if len(sequence.tokens) < sequence.goal]:
        rng.shuffle(active)
        chunks = []
        for sequence in active:
            remaining = len(sequence.tokens) - sequence.computed
            size = remaining if remaining == 1 else rng.randint(1, min(remaining, chunk_limit))
            end = sequence.computed + size
            while len(sequence.table) * BLOCK_SIZE < end:
                sequence.table.append(free.pop())
            tokens = sequence.tokens[sequence.computed : end]
            sampling = GREEDY if end == len(sequence.tokens) else None
            chunks.append(Chunk(tokens, sequence.computed, sequence.table, sampling))
        for sequence, chunk, result in zip(active, chunks, runner.run(chunks), strict=True):
            sequence.computed += len(chunk.token_ids)
            assert len(result.tokens) == (chunk.sampling is not None)
            sequence.tokens.extend(result.tokens)
    return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


@pytest.fixture(scope="module")
def runner(demo_gguf):
    return load_runner(demo_gguf, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def text_tokens(hf_tokenizer):
    """A long run of real text, as token ids."""
    return hf_tokenizer(TEXT * 6).input_ids


@pytest.fixture(scope="module")
def prompts(text_tokens):
    """Prompts of 1 to 600 tokens that start at different places of the text."""
    return [text_tokens[7 * i : 7 * i + length] for i, length in enumerate(PROMPT_LENGTHS)]


@pytest.fixture(scope="module")
def oracle(hf_model, prompts):
    """transformers' greedy tokens, and for each the log-probability gap to its runner-up."""
    results = []
    for prompt in prompts:
        output = hf_model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        top = [scores.log_softmax(-1).topk(2).values[0] for scores in output.scores]
        results.append((output.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in top]))
    return results


def assert_same(outputs, oracle):
    """Equal but for numeric ties; returns how many ties excused a difference."""
    ties = 0
    for output, (expected, gaps) in zip(outputs, oracle, strict=True):
        assert len(output) == len(expected)
        for token, wanted, gap in zip(output, expected, gaps, strict=True):
            if token != wanted:
                assert gap < 1e-3, f"{output} != {expected}"
                ties += 1
                break
    return ties


@pytest.mark.timeout(400)
def test_greedy_equals_transformers_in_mixed_batches_of_odd_chunks(runner, prompts, oracle):
    runner.pool.fill_(torch.nan)  # whatever is read without having been written shows
    ties = assert_same(drive(runner, prompts, NEW_TOKENS, random.Random(5)), oracle)
    assert ties <= 1


def test_one_at_a_time_in_one_chunk_gives_the_same(runner, prompts, oracle):
    some = range(1, len(prompts) - 1, 3)
    outputs = [drive(runner, [prompts[i]], NEW_TOKENS, random.Random(i), 1000)[0] for i in some]
    assert assert_same(outputs, [oracle[i] for i in some]) <= 1


def test_resumed_on_a_cached_prefix_gives_the_same(runner, prompts, oracle):
    """Prefill that starts behind blocks which another request computed."""
    rng, index = random.Random(2), PROMPT_LENGTHS.index(257)
    prompt = prompts[index]
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    prefix = [free.pop() for _ in range(6)]
    runner.run([Chunk(prompt[: 6 * BLOCK_SIZE], 0, prefix, None)])
    before = runner.pool[prefix].clone()
    outputs = drive(runner, [prompt] * 3, NEW_TOKENS, rng, shared=prefix, free=free)
    assert_same(outputs, [oracle[index]] * 3)
    assert torch.equal(runner.pool[prefix], before), "shared blocks were written"


def test_reused_blocks_leak_nothing_of_their_old_tail(runner, text_tokens):
    """P+X and P+Y, |P| = 2.5 blocks, run through the very same blocks and together."""
    prefix = text_tokens[:40]
    endings = [text_tokens[100 + 9 * i : 109 + 9 * i] for i in range(3)]
    cold = []
    for ending in endings:
        runner.pool.zero_()
        cold.append(drive(runner, [prefix + ending], 3, random.Random(1))[0])
    blocks = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    runner.pool.fill_(torch.nan)
    runner.run([Chunk(prefix[:32], 0, blocks[:2], None)])
    for ending, expected in zip(endings, cold, strict=True):
        free = blocks[2:6][::-1]
        warm = drive(runner, [prefix + ending], 3, random.Random(4), shared=blocks[:2], free=free)
        assert warm == [expected]
    together = drive(
        runner,
        [prefix + ending for ending in endings],
        3,
        random.Random(6),
        shared=blocks[:2],
        free=blocks[2:],
    )
    assert together == cold


def test_seeded_sampling_does_not_depend_on_the_batch(runner, prompts):
    """The same (seed, position) draws the same token alone, in a batch, and after a resume."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95, seed=11)
    chunks = [Chunk(prompts[i][:15], 0, [3 * i], params) for i in range(3, 8)]
    alone = [runner.run([chunk])[0] for chunk in chunks]
    assert runner.run(chunks) == alone
    resumed = Chunk(chunks[0].token_ids[9:], 9, chunks[0].block_table, params)
    assert runner.run([resumed, chunks[1]]) == alone[:2]
    other = SamplingParams(max_tokens=1, temperature=1.0, seed=12)
    assert runner.run([Chunk(chunk.token_ids, 0, chunk.block_table, other) for chunk in chunks]) != alone


def test_only_chunks_that_ask_get_a_token(runner, prompts):
    """An intermediate chunk gives None, never a placeholder."""
    chunks = [
        Chunk(prompts[4][:4], 0, [0], None),
        Chunk(prompts[5][:4], 0, [1], GREEDY),
        Chunk(prompts[6][:1], 0, [2], None),
    ]
    first, second, third = runner.run(chunks)
    assert first.tokens == () and third.tokens == ()
    assert second == runner.run([chunks[1]])[0]
    assert runner.run([chunks[0]]) == [ChunkResult()]
    assert runner.run([]) == []


def test_the_limit_is_enforced_where_it_is_advertised(demo_gguf):
    """The last position is usable, the one after it is refused before anything is written."""
    small = load_runner(demo_gguf, num_blocks=3, block_size=16, max_context=33)
    assert small.shape.max_context == 33
    assert len(small.run([Chunk(list(range(33)), 0, [2, 0, 1], GREEDY)])[0].tokens) == 1
    before = small.pool.clone()
    for chunk, message in [
        (Chunk([5], 33, [2, 0, 1], GREEDY), "ends at 34, beyond max_context 33"),
        (Chunk(list(range(99)), 0, [2, 0, 1], GREEDY), "ends at 99"),
        (Chunk([], 3, [2], GREEDY), "0 tokens at 3"),
        (Chunk([1], -1, [2], GREEDY), "1 tokens at -1"),
        (Chunk([49152], 0, [2], GREEDY), "outside the vocabulary of 49152"),
        (Chunk([-1], 0, [2], GREEDY), "outside the vocabulary"),
        (Chunk([1], 16, [2], GREEDY), "needs 2 blocks"),
        (Chunk([1], 0, [3], GREEDY), "a pool of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            small.run([Chunk([7], 0, [0], None), chunk])
    assert torch.equal(small.pool, before)


def test_says_what_it_is(runner):
    assert runner.device == "cpu"
    assert runner.dtype_name == "float32"
    assert runner.eos_token_ids == {2}
    shape = runner.shape
    assert (shape.vocab_size, shape.max_context, shape.layers, shape.kv_heads, shape.head_dim) == (
        49152, 8192, 30, 3, 64,
    )  # fmt: skip
    assert runner.pool.nbytes == NUM_BLOCKS * shape.block_bytes(BLOCK_SIZE)


def test_bfloat16_runs_and_stays_close(demo_gguf, prompts, oracle):
    """Half precision is not compared token by token; its first choice agrees on most prompts."""
    half = load_runner(demo_gguf, dtype="bfloat16", num_blocks=64)
    assert half.pool.dtype == torch.bfloat16 and half.shape.bytes_per_element == 2
    first = [half.run([Chunk(prompt, 0, range(40), GREEDY)])[0] for prompt in prompts[2:8]]
    agree = [result.tokens[0] == tokens[0] for result, (tokens, _) in zip(first, oracle[2:8], strict=True)]
    assert sum(agree) >= 4


def test_an_impossible_pool_or_device_is_a_model_error(demo_gguf):
    with pytest.raises(ModelError, match=r"needs \d+ bytes .* lower workers.pool_tokens"):
        load_runner(demo_gguf, num_blocks=10**9)
    with pytest.raises(ModelError, match="tpu"):
        load_runner(demo_gguf, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="sees no CUDA device"):
            load_runner(demo_gguf, device="cuda")
