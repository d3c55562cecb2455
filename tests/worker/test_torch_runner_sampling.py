"""On a real model: sampled tokens and log-probabilities do not depend on how the work is cut up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvhive.worker.model_runner import Chunk
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams

BLOCKS = 64
PROMPT_LENGTH = 53
NEW_TOKENS = 7
OPTIONS = {
    "greedy": SamplingParams(NEW_TOKENS, logprobs=3),
    "sampled": SamplingParams(NEW_TOKENS, temperature=0.9, top_p=0.95, seed=3, choice=2, logprobs=0),
    "penalised": SamplingParams(
        NEW_TOKENS,
        temperature=0.8,
        top_k=40,
        typical_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias=((28, 2.0),),
        min_tokens=4,
        stop_token_ids=frozenset({28, 30}),
        seed=2**64 - 1,
    ),
}
TEXT = """The committee met again on Thursday to discuss the bridge. Its three spans had been closed since the
flood, and the farmers on the far bank now drove forty miles to reach the mill. An engineer from the county
showed photographs of the piers: two were sound, he said, and the third had shifted by the width of a hand."""


@pytest.fixture(scope="module")
def runner(demo_gguf):
    return load_runner(demo_gguf, num_blocks=BLOCKS)


@pytest.fixture(scope="module")
def prompt(hf_tokenizer):
    """Real text, so that the next token is mostly far from a tie."""
    return hf_tokenizer(TEXT * 2).input_ids[:PROMPT_LENGTH]


@pytest.fixture(scope="module")
def oracle(hf_model, prompt):
    """transformers' log-probabilities of what follows each token of the prompt."""
    with torch.inference_mode():
        return hf_model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def generate(runner, prompt, params, cut=None, draft=None, rng=None):
    """Generate all tokens and their log-probabilities.

    cut: how many tokens of a prefill the next step computes, from how many there are
    draft: what the step guesses, from the tokens so far; every step then computes at random blocks
    """
    table = (rng or random.Random(1)).sample(range(BLOCKS), (len(prompt) + 2 * NEW_TOKENS) // 16 + 1)
    tokens, computed, logprobs = list(prompt), 0, []
    goal = len(prompt) + params.max_tokens
    while len(tokens) < goal:
        size = min(len(tokens) - computed, cut(len(tokens) - computed) if cut else len(tokens))
        end = computed + size
        last = end == len(tokens)
        drafts = draft(tokens)[: goal - len(tokens) - 1] if draft and last else ()
        chunk = Chunk(
            tokens[computed:end],
            computed,
            table,
            params if last else None,
            tokens[:end],
            len(prompt),
            drafts=drafts,
        )
        (result,) = runner.run([chunk])
        assert not result.failed
        computed = end + max(0, len(result.tokens) - 1)
        tokens += result.tokens
        logprobs += result.logprobs
        if cut and rng and last and rng.random() < 0.3:
            computed = 0  # preempted: everything is computed anew, output included
            rng.shuffle(table)
    return tokens[len(prompt) :], logprobs


@pytest.fixture(scope="module")
def expected(runner, prompt):
    """Each option's tokens, computed without cutting anything."""
    return {name: generate(runner, prompt, params) for name, params in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_odd_chunks_and_preemption_give_the_same_tokens(runner, prompt, expected, name):
    rng = random.Random(6)
    tokens, logprobs = generate(runner, prompt, OPTIONS[name], lambda there: rng.randint(1, 31), rng=rng)
    assert tokens == expected[name][0]
    assert_close(logprobs, expected[name][1])


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_right_wrong_and_half_right_give_the_same_tokens(runner, prompt, expected, name):
    """Rejected drafts leave KV behind, which the next step must overwrite before it reads."""
    tokens, logprobs = expected[name]

    def drafter(wrong_from):
        def draft(so_far):
            done = len(so_far) - len(prompt)
            right = tokens[done : done + wrong_from]
            return [*right, 11, 12, 13][:4]

        return draft

    for wrong_from in (0, 2, 4):
        drafted = generate(runner, prompt, OPTIONS[name], draft=drafter(wrong_from))
        assert drafted[0] == tokens
        assert_close(drafted[1], logprobs)


def test_another_worker_gives_the_same_tokens(demo_gguf, runner, prompt, expected):
    other = load_runner(demo_gguf, num_blocks=BLOCKS)
    for name, params in OPTIONS.items():
        assert generate(other, prompt, params, rng=random.Random(5))[0] == expected[name][0]


def test_a_batch_of_all_options_gives_each_row_its_own(runner, prompt, expected):
    """One chunk of each kind in one step, drafts and prompt log-probabilities among them."""
    chunks = []
    for index, (name, params) in enumerate(OPTIONS.items()):
        table = range(8 * index, 8 * index + 8)
        drafts = expected[name][0][:index]
        chunks.append(Chunk(prompt, 0, table, params, prompt, len(prompt), drafts=drafts))
    asks = Chunk(prompt[:20], 0, range(56, 64), None, prompt_logprobs=1, next_prompt_token=prompt[20])
    *results, asked = runner.run([*chunks, asks])
    for index, (name, result) in enumerate(zip(OPTIONS, results, strict=True)):
        assert list(result.tokens) == expected[name][0][: index + 1]
    assert len(asked.prompt_logprobs) == 20


def assert_close(logprobs, others):
    assert len(logprobs) == len(others)
    for one, other in zip(logprobs, others, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_log_probabilities_equal_transformers_cold_and_behind_a_cached_prefix(runner, prompt, oracle):
    params = SamplingParams(1, logprobs=5)
    table = list(range(8))
    (cold,) = runner.run([Chunk(prompt, 0, table, params)])
    (warm,) = runner.run([Chunk(prompt[48:], 48, table, params)])
    best = oracle[-1].topk(5)
    for result in (cold, warm):
        (logprob,) = result.logprobs
        assert abs(logprob.logprob - oracle[-1][result.tokens[0]]) < 1e-4
        assert [token for token, _ in logprob.top] == best.indices.tolist()
        for (_, value), wanted in zip(logprob.top, best.values, strict=True):
            assert abs(value - wanted) < 1e-4


@pytest.mark.parametrize("cut", [PROMPT_LENGTH, 17])
def test_prompt_log_probabilities_equal_transformers_on_a_chunked_prefill(runner, prompt, oracle, cut):
    table, found = list(range(8, 16)), []
    for start in range(0, PROMPT_LENGTH, cut):
        end = min(start + cut, PROMPT_LENGTH)
        following = prompt[end] if end < PROMPT_LENGTH else None
        params = None if end < PROMPT_LENGTH else SamplingParams(1)
        chunk = Chunk(prompt[start:end], start, table, params, prompt_logprobs=2, next_prompt_token=following)
        (result,) = runner.run([chunk])
        found += result.prompt_logprobs
    assert len(found) == PROMPT_LENGTH - 1
    for position, logprob in enumerate(found):
        assert abs(logprob.logprob - oracle[position, prompt[position + 1]]) < 1e-4
        for (token, value), wanted in zip(logprob.top, oracle[position].topk(2).values, strict=True):
            assert abs(value - wanted) < 1e-4
            assert abs(value - oracle[position, token]) < 1e-4


def test_a_choice_is_its_own_stream(runner, prompt):
    params = SamplingParams(1, temperature=1.5, seed=8)
    (result,) = runner.run([Chunk(prompt, 0, range(8), params)])
    seen = {result.tokens}
    for choice in range(1, 8):
        own = replace(params, choice=choice)
        seen.add(runner.run([Chunk(prompt[-1:], PROMPT_LENGTH - 1, range(8), own)])[0].tokens)
    assert len(seen) > 4


def test_what_breaks_the_contract_is_refused_before_anything_is_written(runner):
    before = runner.pool.clone()
    penalised = SamplingParams(1, presence_penalty=1.0)
    for chunk, message in [
        (Chunk([1], 0, [0], None, drafts=[2]), "drafts can be verified only where a token is sampled"),
        (Chunk([1], 0, [0], SamplingParams(1), drafts=[49152]), "outside the vocabulary"),
        (Chunk([1], 0, [0], None, prompt_logprobs=0, next_prompt_token=-1), "outside the vocabulary"),
        (
            Chunk([1], 8191, range(512), SamplingParams(1), drafts=[1]),
            "ends at 8193, beyond max_context 8192",
        ),
        (Chunk([1] * 15, 0, [0], SamplingParams(1), drafts=[1, 1]), "needs 2 blocks"),
        (Chunk([1, 2], 3, [0], penalised, [1, 2], 1), "penalties need 5 tokens of history, has 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner.run([Chunk([7], 0, [5], None), chunk])
    assert torch.equal(runner.pool, before)
