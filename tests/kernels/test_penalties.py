"""Bias, penalties and forbidden tokens are what a plain loop over the tokens makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.kernels.penalties import PenaltyRow, apply_penalties

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
ROWS = st.builds(
    dict,
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.5]),
    presence=st.sampled_from([0.0, 0.75, -2.0]),
    bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, -1.0, 2.5])), max_size=4).map(tuple),
    forbidden=st.frozensets(TOKENS, max_size=3),
    allowed=st.none() | st.frozensets(st.integers(0, 40), min_size=1),
    history=st.lists(TOKENS, max_size=20),
    prompt_share=st.floats(0, 1),
)


def oracle(logits, repetition, frequency, presence, bias, forbidden, allowed, history, prompt_tokens):
    result = list(logits)
    for token, value in bias:
        result[token] += value
    for token in range(len(result)):
        if token in history:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        count = history[prompt_tokens:].count(token)
        result[token] -= frequency * count + (presence if count else 0)
        if token in forbidden or (allowed is not None and token not in allowed):
            result[token] = -math.inf
    return result


def words(tokens, count):
    """The bits of some tokens, as PenaltyRow has them."""
    bits = [sum(1 << (token % 32) for token in tokens if token // 32 == word) for word in range(count)]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.none(), ROWS), min_size=1, max_size=5), st.integers(0, 2**31))
def test_equals_a_loop_over_the_tokens_whatever_the_batch(cases, seed):
    logits = torch.randn(len(cases), VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 4
    expected, rows = [], []
    for original, case in zip(logits.tolist(), cases, strict=True):
        if case is None:
            rows.append(None)
            expected.append(original)
            continue
        options = dict(case)
        share = options.pop("prompt_share")
        options["prompt_tokens"] = int(share * len(options["history"]))
        expected.append(oracle(original, **options))
        history = torch.tensor(options["history"], dtype=torch.int64)
        allowed = None if options["allowed"] is None else words(options["allowed"], 2)
        rows.append(PenaltyRow(**options | {"history": history, "allowed": allowed}))
    apply_penalties(logits, rows)
    torch.testing.assert_close(logits, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_frequency_and_presence_count_the_output_and_repetition_counts_all():
    history = torch.tensor([1, 1, 2, 2, 2, 3])
    logits = torch.full((2, 5), 4.0)
    apply_penalties(
        logits,
        [
            PenaltyRow(frequency=0.5, presence=0.25, history=history, prompt_tokens=3),
            PenaltyRow(repetition=2.0, history=history, prompt_tokens=3),
        ],
    )
    assert logits.tolist() == [[4, 4, 2.75, 3.25, 4], [4, 2, 2, 2, 4]]


def test_an_empty_history_and_no_history_change_nothing():
    logits = torch.ones(2, 4)
    empty = torch.empty(0, dtype=torch.int64)
    apply_penalties(logits, [PenaltyRow(repetition=2.0, history=empty), PenaltyRow(frequency=1.0)])
    assert torch.equal(logits, torch.ones(2, 4))


def test_a_token_the_model_rules_out_stays_ruled_out():
    logits = torch.tensor([[-torch.inf, 1.0]])
    row = PenaltyRow(repetition=2.0, frequency=-9.0, bias=((0, 100.0),), history=torch.tensor([0, 0]))
    apply_penalties(logits, [row])
    assert logits.tolist() == [[-math.inf, 1.0]]


def test_forbidden_tokens_outside_the_vocabulary_need_no_forbidding():
    logits = torch.zeros(2, 4)
    apply_penalties(logits, [PenaltyRow(forbidden=frozenset({-1, 4, 3})), None])
    assert logits.tolist() == [[0, 0, 0, -math.inf], [0, 0, 0, 0]]


def test_what_has_no_bit_is_not_allowed():
    logits = torch.zeros(3, 40)
    apply_penalties(
        logits, [PenaltyRow(allowed=words({0, 31}, 1)), None, PenaltyRow(allowed=words(set(), 1))]
    )
    kept = [[token for token, logit in enumerate(row) if logit == 0] for row in logits.tolist()]
    assert kept == [[0, 31], list(range(40)), []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition": 0.0}, "repetition"),
        ({"repetition": math.nan}, "repetition"),
        ({"frequency": math.inf}, "frequency"),
        ({"presence": math.nan}, "presence"),
        ({"bias": ((4, 1.0),)}, "bias"),
        ({"bias": ((0, math.nan),)}, "bias"),
    ],
)
def test_what_is_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        apply_penalties(torch.zeros(1, 4), [PenaltyRow(**options)])
