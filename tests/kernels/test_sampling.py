"""Sampling draws from exactly the distribution that its parameters describe."""

from __future__ import annotations

import math

import pytest
import torch

from kvhive.kernels.sampling import NonFiniteLogits, SamplingRow, sample


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution, by sorting everything: temperature, top_k, top_p (renormalised), min_p."""
    scores = logits.double() / temperature
    order = scores.argsort(descending=True)
    probabilities = scores.softmax(0)[order]
    if top_k:
        probabilities[top_k:] = 0
    probabilities /= probabilities.sum()
    probabilities[(probabilities.cumsum(0) - probabilities) >= top_p] = 0
    probabilities[probabilities < min_p * probabilities[0]] = 0
    result = torch.zeros_like(scores)
    result[order] = probabilities / probabilities.sum()
    return result


def chi_square_limit(freedom, z=3.7):
    """The value that chi-square exceeds once in ten thousand (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case):
    torch.manual_seed(3)
    logits = torch.randn(100) * 2
    draws = 1000
    rows = [SamplingRow(**{"temperature": 1.0} | case, seed=12345, position=i) for i in range(draws)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(draws, -1), rows)), minlength=100)
    expected = kept(logits, **case) * draws
    assert counts[expected == 0].sum() == 0, "a token outside the support was drawn"
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic < chi_square_limit(int(common.sum()) - 1)


def test_a_nucleus_wider_than_the_first_probe_is_found():
    logits = torch.zeros(5000) + torch.linspace(0, 1e-3, 5000)
    rows = [SamplingRow(temperature=1.0, top_p=0.5, seed=9, position=i) for i in range(100)]
    tokens = sample(logits.expand(100, -1), rows)
    support = kept(logits, top_p=0.5) > 0
    assert support.sum() > 2000
    assert all(support[token] for token in tokens)
    assert len(set(tokens)) > 85


def test_a_row_does_not_depend_on_its_batch_mates():
    torch.manual_seed(0)
    logits = torch.randn(8, 200)
    rows = [SamplingRow(temperature=0.9 * (i % 3), top_k=5 * i, seed=i, position=i) for i in range(8)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(8)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_seed_and_position_decide():
    logits = torch.zeros(1, 1000)

    def draw(seed, position):
        return sample(logits, [SamplingRow(temperature=1.0, seed=seed, position=position)])[0]

    assert draw(1, 5) == draw(1, 5)
    assert len({draw(seed, 5) for seed in range(20)}) > 15
    assert len({draw(2**64 - 1, position) for position in range(20)}) > 15


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(2, 500)
    logits[0, [77, 300, 499]] = 3.0
    assert sample(logits, [SamplingRow(), SamplingRow()]) == [77, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-320, 1e-10, 1e-3])
def test_a_tiny_temperature_is_greedy_and_not_a_nan(temperature, dtype):
    torch.manual_seed(0)
    logits = torch.randn(1, 300).to(dtype)
    greedy = sample(logits, [SamplingRow()])[0]
    token = sample(logits, [SamplingRow(temperature=temperature, top_p=0.9, min_p=0.1, seed=4)])[0]
    assert logits[0, token] == logits[0, greedy]


def test_top_k_one_and_a_tiny_top_p_are_greedy():
    torch.manual_seed(0)
    logits = torch.randn(1, 300)
    greedy = sample(logits, [SamplingRow()])
    for case in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        for position in range(20):
            assert sample(logits, [SamplingRow(temperature=5.0, position=position, **case)]) == greedy


def test_tokens_that_tie_at_the_edge_are_kept_alike():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    seen = {sample(logits, [SamplingRow(temperature=1.0, top_k=2, position=i)])[0] for i in range(100)}
    assert seen == {1, 2, 3}


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7] = logits[0, 9] = -5.0
    seen = {sample(logits, [SamplingRow(temperature=9.0, seed=1, position=i)])[0] for i in range(50)}
    assert seen == {7, 9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_are_an_error_that_names_the_rows(value, temperature):
    logits = torch.zeros(3, 50)
    logits[1, 20] = value
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits, [SamplingRow(temperature=temperature)] * 3)
    assert caught.value.rows == (1,)
    with pytest.raises(NonFiniteLogits):
        sample(torch.full((1, 50), -torch.inf), [SamplingRow(temperature=temperature)])


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.nan},
    ],
)
def test_parameters_out_of_range_are_refused(row):
    with pytest.raises(ValueError, match=next(iter(row))):
        sample(torch.zeros(1, 5), [SamplingRow(**row)])


def test_no_rows_no_tokens_and_a_wrong_count_is_refused():
    assert sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="logits"):
        sample(torch.zeros(2, 5), [SamplingRow()])
