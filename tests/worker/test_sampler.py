"""From logits to results: drafts change nothing, and each row's log-probabilities are its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from distributions import assert_follows

from kvhive.kernels.penalties import PenaltyRow, apply_penalties
from kvhive.worker.model_runner import Chunk, ChunkResult
from kvhive.worker.sampler import logit_offsets, read_results
from kvhive.worker.sequence import SamplingParams

VOCAB = 5
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
"""A model: the logits of what follows a token."""

PROMPT = [2, 0, 2]
OPTIONS = {
    "plain": SamplingParams(max_tokens=3, temperature=1.0),
    "filtered": SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9),
    "penalised": SamplingParams(
        max_tokens=3,
        temperature=1.3,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        logit_bias=((1, 1.5), (3, -1.0)),
    ),
    "early": SamplingParams(max_tokens=3, temperature=1.0, min_tokens=2, stop_token_ids=frozenset({0, 4})),
}


def logits_of(chunks):
    """What the model computes for a step."""
    tokens = [
        [*chunk.token_ids, *chunk.drafts][offset] for chunk in chunks for offset in logit_offsets(chunk)
    ]
    return TABLE[tokens] if tokens else TABLE[:0]


def generate(params, count, drafter=None):
    """`count` answers of three tokens, all in one batch; each has its own seed."""
    answers = [list(PROMPT) for _ in range(count)]
    verified = accepted = 0
    while active := [i for i in range(count) if len(answers[i]) < len(PROMPT) + 3]:
        chunks = []
        for i in active:
            room = len(PROMPT) + 2 - len(answers[i])
            drafts = drafter(answers[i], room) if drafter else ()
            own = replace(params, seed=i)
            start = len(answers[i]) - 1
            chunks.append(Chunk(answers[i][-1:], start, (), own, answers[i], len(PROMPT), drafts=drafts))
        for i, result in zip(active, read_results(logits_of(chunks), chunks), strict=True):
            answers[i] = [*answers[i], *result.tokens]
            verified += result.drafted
            accepted += len(result.tokens) - 1
    return [tuple(answer[len(PROMPT) :]) for answer in answers], verified, accepted


def exact_answers(params):
    """The probability of each answer of three tokens, token by token from the definition."""
    result = []
    for answer in itertools.product(range(VOCAB), repeat=3):
        probability = 1.0
        for index, token in enumerate(answer):
            history = [*PROMPT, *answer[:index]]
            logits = TABLE[history[-1]][None].double()
            apply_penalties(
                logits,
                [
                    PenaltyRow(
                        params.repetition_penalty,
                        params.frequency_penalty,
                        params.presence_penalty,
                        params.logit_bias,
                        params.stop_token_ids if index < params.min_tokens else frozenset(),
                        torch.tensor(history),
                        len(PROMPT),
                    )
                ],
            )
            probabilities = (logits[0] / params.temperature).softmax(0)
            order = probabilities.argsort(descending=True)
            outside = order[(probabilities[order].cumsum(0) - probabilities[order]) >= params.top_p]
            probabilities[outside] = 0
            probability *= float(probabilities[token] / probabilities.sum())
        result.append(probability)
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("name", OPTIONS)
def test_with_drafts_answers_follow_the_exact_distribution_and_equal_those_without(name):
    """21,000 tokens with drafts that are right about half of the time."""
    params, rng = OPTIONS[name], random.Random(4)

    def drafter(tokens, room):
        drafts = []
        for _ in range(room):
            drafts.append(
                int(TABLE[[*tokens, *drafts][-1]].argmax()) if rng.random() < 0.7 else rng.randrange(5)
            )
        return drafts

    speculated, verified, accepted = generate(params, 7000, drafter)
    assert 0.1 < accepted / verified < 0.9
    assert speculated[:1500] == generate(params, 1500)[0]
    cells = [25 * a + 5 * b + c for a, b, c in speculated]
    assert_follows(cells, exact_answers(params))


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_are_kept_up_to_the_first_that_would_not_have_been_sampled(name, right):
    params = replace(OPTIONS[name], seed=3, logprobs=1)
    history, expected = list(PROMPT), []
    for _ in range(4):
        chunk = Chunk(history[-1:], len(history) - 1, (), params, history, len(PROMPT))
        (token,) = read_results(logits_of([chunk]), [chunk])[0].tokens
        history, expected = [*history, token], [*expected, token]
    drafts = [*expected[:right], *[(token + 1) % VOCAB for token in expected[right:3]]]
    chunk = Chunk(PROMPT[-1:], 2, (), params, PROMPT, len(PROMPT), drafts=drafts)
    (result,) = read_results(logits_of([chunk]), [chunk])
    assert list(result.tokens) == expected[: right + 1]
    assert result.drafted == 3
    assert len(result.logprobs) == len(result.tokens)
    standing = [PROMPT[-1], *expected]
    for before, token, logprob in zip(standing, result.tokens, result.logprobs, strict=False):
        assert abs(logprob.logprob - TABLE[before].log_softmax(0)[token]) < 1e-5


def test_rows_of_a_mixed_step_belong_to_their_chunks():
    """Prefills that ask nothing, prompts that ask log-probabilities, decodes and drafts, side by side."""
    greedy = SamplingParams(max_tokens=1, logprobs=2)
    chunks = [
        Chunk([1, 2, 3], 0, (), None),
        Chunk([4, 0, 1], 0, (), None, prompt_logprobs=1, next_prompt_token=3),
        Chunk([3], 5, (), greedy, drafts=[1, 1]),
        Chunk([2, 4], 0, (), None, prompt_logprobs=0),
        Chunk([0, 2, 4], 3, (), greedy, prompt_logprobs=2),
        Chunk([1], 0, (), None, prompt_logprobs=1),
    ]
    together = read_results(logits_of(chunks), chunks)
    assert together == [read_results(logits_of([chunk]), [chunk])[0] for chunk in chunks]
    assert together[0] == ChunkResult() and together[5] == ChunkResult()
    assert [len(result.prompt_logprobs) for result in together] == [0, 3, 0, 1, 2, 0]
    assert [len(result.logprobs) for result in together] == [0, 0, len(together[2].tokens), 0, 1, 0]
    expected = TABLE.log_softmax(-1)
    for before, token, logprob in zip((4, 0, 1), (0, 1, 3), together[1].prompt_logprobs, strict=True):
        assert abs(logprob.logprob - expected[before, token]) < 1e-5


def test_only_the_chunk_whose_row_is_not_finite_fails():
    params = SamplingParams(max_tokens=1)
    chunks = [
        Chunk([1], 0, (), params),
        Chunk([2], 0, (), params),
        Chunk([1], 0, (), None, prompt_logprobs=0),
    ]
    logits = logits_of(chunks)
    expected = read_results(logits, chunks)
    logits[0, 3] = torch.nan
    assert read_results(logits, chunks) == [ChunkResult(failed=True), *expected[1:]]
    asked = [Chunk([1, 2, 3], 0, (), params, prompt_logprobs=0)]
    logits = logits_of(asked)
    logits[0, 3] = torch.inf
    assert read_results(logits, asked) == [ChunkResult(failed=True)]


def test_a_row_after_a_rejected_draft_may_be_anything():
    """And a row after an accepted one that is not finite costs what it would cost without drafts."""
    params = SamplingParams(max_tokens=4)
    right = int(TABLE[1].argmax())
    for draft, row in ((right, 1), ((right + 1) % VOCAB, 1)):
        chunk = Chunk([1], 0, (), params, drafts=[draft])
        logits = logits_of([chunk])
        logits[row] = torch.nan
        (result,) = read_results(logits, [chunk])
        assert not result.failed
        assert list(result.tokens) == [right]


def test_the_output_begins_where_the_prompt_ends_however_the_work_is_cut():
    """A resumed sequence recomputes prompt and output in one chunk: penalties and min_tokens do not shift."""
    params = replace(OPTIONS["penalised"], seed=1, min_tokens=3, stop_token_ids=frozenset({1}))
    history = [2, 0, 2, 4, 4]
    decode = Chunk([4], 4, (), params, history, 3)
    resumed = Chunk(history, 0, (), params, history, 3)
    later = Chunk(history[2:], 2, (), params, history, 3)
    results = [read_results(logits_of([chunk]), [chunk])[0] for chunk in (decode, resumed, later)]
    assert results[0] == results[1] == results[2]


def test_no_stop_token_before_min_tokens_and_any_after():
    logits = torch.tensor([[9.0, 1.0]])
    params = SamplingParams(max_tokens=1, min_tokens=2, stop_token_ids=frozenset({0}))
    for generated, expected in ((0, 1), (1, 1), (2, 0)):
        chunk = Chunk([1], 3 + generated, (), params, (), prompt_tokens=4)
        assert read_results(logits, [chunk])[0].tokens == (expected,)


def test_logits_of_another_step_are_refused():
    with pytest.raises(ValueError, match="needs 1 rows, has 2"):
        read_results(TABLE[:2], [Chunk([1], 0, (), SamplingParams(max_tokens=1))])
