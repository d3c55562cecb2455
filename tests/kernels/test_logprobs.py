"""Log-probabilities are log_softmax, finite, and name the likeliest tokens in one order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.kernels.logprobs import LEAST_LOGPROB, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top", [0, 1, 5, 50])
def test_equals_log_softmax(dtype, top):
    torch.manual_seed(1)
    logits = (torch.randn(7, 50) * 5).to(dtype)
    tokens = torch.randint(0, 50, (7,)).tolist()
    expected = logits.double().log_softmax(-1)
    for row, (token, result) in enumerate(zip(tokens, token_logprobs(logits, tokens, top), strict=True)):
        logprob, alternatives = result
        assert abs(logprob - expected[row, token]) < 1e-5
        assert [token for token, _ in alternatives] == expected[row].argsort(
            descending=True, stable=True
        ).tolist()[:top]
        assert all(abs(value - expected[row, token]) < 1e-5 for token, value in alternatives)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 31))
def test_equally_likely_tokens_go_by_the_lower_id(levels, top):
    ((_, alternatives),) = token_logprobs(torch.tensor([levels]).float(), [0], top)
    wanted = sorted(range(len(levels)), key=lambda token: (-levels[token], token))[:top]
    assert [token for token, _ in alternatives] == wanted


def test_a_token_that_is_ruled_out_is_finite_and_no_alternative():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 2], logits[0, 4] = 1.0, 1.0
    for top in (2, 3, 6):
        ((logprob, alternatives),) = token_logprobs(logits, [0], top)
        assert logprob == LEAST_LOGPROB
        assert [token for token, _ in alternatives] == [2, 4]


def test_a_vanishing_probability_is_finite():
    ((logprob, alternatives),) = token_logprobs(torch.tensor([[0.0, -1e30]]), [1], 2)
    assert logprob == LEAST_LOGPROB
    assert alternatives == ((0, 0.0), (1, LEAST_LOGPROB))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_only_the_row_that_is_not_finite_has_none(value):
    logits = torch.zeros(3, 5)
    logits[1, 3] = value
    first, second, third = token_logprobs(logits, [0, 0, 0], 2)
    assert second is None
    assert first == third == token_logprobs(torch.zeros(1, 5), [0], 2)[0]
    assert token_logprobs(torch.full((1, 4), -torch.inf), [0], 1) == [None]


def test_a_long_prompt_is_computed_in_slices():
    """600 rows of a vocabulary of 49,152 are 118 MB; no operation allocates half of that on top."""
    torch.manual_seed(0)
    logits = torch.randn(600, 49152)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        results = token_logprobs(logits, [7] * 600, 5)
    assert len(results) == 600
    assert max(event.cpu_memory_usage for event in profile.events()) < 50e6
    row = logits[599].log_softmax(-1)
    assert abs(results[599][0] - row[7]) < 1e-5


def test_no_rows_and_shapes_that_do_not_fit():
    assert token_logprobs(torch.zeros(0, 5), [], 3) == []
    with pytest.raises(ValueError, match="logits"):
        token_logprobs(torch.zeros(2, 5), [1], 0)
