"""The pretending runner keeps the whole contract of a step, so that everything above can be tested on it."""

from __future__ import annotations

import pytest

from kvhive.worker.model_runner import Chunk
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.simulated_runner import SimulatedRunner

TABLE = [3, 1, 4, 2]
PROMPT = list(range(10, 16))


def new_runner():
    return SimulatedRunner(num_blocks=8, block_size=4)


def step(runner, tokens, start=0, drafts=(), **sampling):
    """Compute tokens[start:] of a sequence whose prompt is PROMPT, and sample."""
    params = SamplingParams(max_tokens=9, **sampling)
    chunk = Chunk(tokens[start:], start, TABLE, params, tokens, len(PROMPT), drafts=drafts)
    return runner.run([chunk])[0]


def plain(tokens, count, **sampling):
    """The next `count` tokens without drafts, on a fresh runner."""
    runner, result = new_runner(), list(tokens)
    for _ in range(count):
        result += step(runner, result, **sampling).tokens
    return result[len(tokens) :]


@pytest.mark.parametrize("right", range(4))
def test_drafts_are_accepted_as_far_as_they_are_what_would_have_been_sampled(right):
    expected = plain(PROMPT, 4)
    drafts = [*expected[:right], *[998] * (3 - right)]
    result = step(new_runner(), PROMPT, drafts=drafts)
    assert list(result.tokens) == expected[: right + 1]
    assert result.drafted == 3
    assert not result.failed


def test_generation_goes_on_over_the_kv_of_accepted_drafts():
    expected = plain(PROMPT, 5)
    runner = new_runner()
    tokens = [*PROMPT, *step(runner, PROMPT, drafts=[expected[0], expected[1], 7]).tokens]
    assert tokens == PROMPT + expected[:3]
    assert list(step(runner, tokens, start=8).tokens) == [expected[3]]


def test_a_draft_after_which_the_logits_are_not_finite_fails_nothing():
    result = step(new_runner(), PROMPT, drafts=[SimulatedRunner.POISON])
    assert list(result.tokens) == plain(PROMPT, 1)


def test_each_choice_is_its_own_stream():
    assert len({tuple(plain(PROMPT, 4, choice=choice)) for choice in range(8)}) == 8


def test_no_stop_token_comes_before_min_tokens():
    expected = plain(PROMPT, 1)
    options = {"stop_token_ids": frozenset(expected), "min_tokens": 1}
    assert plain(PROMPT, 1, **options) == [(expected[0] + 1) % 999]
    assert plain(PROMPT, 1, **options | {"min_tokens": 0}) == expected


def test_every_token_has_log_probabilities_where_asked():
    result = step(new_runner(), PROMPT, drafts=plain(PROMPT, 2), logprobs=3)
    assert len(result.tokens) == len(result.logprobs) == 3
    for token, logprobs in zip(result.tokens, result.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.logprob)
        assert len(logprobs.top) == 3
    assert step(new_runner(), PROMPT).logprobs == ()


def test_prompt_log_probabilities_do_not_depend_on_the_chunks():
    whole = new_runner().run([Chunk(PROMPT, 0, TABLE, None, prompt_logprobs=2)])[0].prompt_logprobs
    runner = new_runner()
    first = Chunk(PROMPT[:4], 0, TABLE, None, prompt_logprobs=2, next_prompt_token=PROMPT[4])
    second = Chunk(PROMPT[4:], 4, TABLE, None, prompt_logprobs=2)
    parts = (*runner.run([first])[0].prompt_logprobs, *runner.run([second])[0].prompt_logprobs)
    assert parts == whole
    assert len(whole) == len(PROMPT) - 1


def test_only_the_chunk_whose_logits_are_not_finite_fails():
    params = SamplingParams(max_tokens=1)
    bad = Chunk([1, SimulatedRunner.POISON], 0, [0], params)
    good = Chunk(PROMPT, 0, [1, 2], params)
    unread = Chunk([SimulatedRunner.POISON, 1], 0, [3], params)
    asked = Chunk([SimulatedRunner.POISON, 1], 0, [3], params, prompt_logprobs=0)
    results = new_runner().run([bad, good, unread, asked])
    assert [result.failed for result in results] == [True, False, False, True]
