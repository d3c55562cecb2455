"""Sampling draws from exactly the distribution that its parameters describe."""

from __future__ import annotations

import math

import pytest
import torch
from distributions import assert_follows, exact

from kvhive.kernels.penalties import PenaltyRow, apply_penalties
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.sampling import SamplingRow, sample
from kvhive.kernels.token_filters import TokenFilters

CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.95, "temperature": 1.4},
    {"top_p": 0.9, "typical_p": 0.6},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.8},
]


def row(temperature=1.0, penalties=None, seed=0, choice=0, position=0, **filters):
    return SamplingRow(temperature, TokenFilters(**filters), penalties, NoiseStream(seed, choice, position))


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case, penalised):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 2
    changed, penalties = logits[None].double(), None
    if penalised:
        best = logits.topk(40).indices
        bias = ((int(best[0]), -4.0), (7, 3.0))
        history = torch.cat((best[:20], best[10:30], best[:5]))
        penalties = PenaltyRow(1.2, 0.3, 0.5, bias, frozenset(best[3:6].tolist()), history, 12)
        apply_penalties(changed, [penalties])
    draws = 2000
    rows = [row(**case, penalties=penalties, seed=777, position=i) for i in range(draws)]
    assert_follows(sample(logits.expand(draws, -1), rows), exact(changed[0], **case))


@pytest.mark.parametrize("part", ["seed", "choice", "position"])
def test_each_part_of_the_stream_draws_anew(part):
    """A chi-square over pairs of draws that differ in one part: the second is independent of the first."""
    logits = torch.tensor([0.0, 0.5, 1.0])
    pairs = [
        row(**{"seed": 5, "choice": 0, "position": i} | ({part: 10_000 + i} if second else {}))
        for i in range(3000)
        for second in (False, True)
    ]
    tokens = sample(logits.expand(len(pairs), -1), pairs)
    joint = torch.outer(logits.softmax(0), logits.softmax(0)).flatten().double()
    assert_follows([3 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)], joint)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_set_wider_than_the_first_probe_is_found(name):
    logits = torch.linspace(0, 1e-3, 5000)
    tokens = sample(logits.expand(300, -1), [row(seed=9, position=i, **{name: 0.5}) for i in range(300)])
    support = exact(logits, **{name: 0.5}) > 0
    assert support.sum() > 2000
    assert all(support[token] for token in tokens)
    assert len(set(tokens)) > 250


def mixed_rows(vocab_size):
    """Rows with every kind of option, some alike."""
    history = torch.arange(30) % vocab_size
    penalties = [
        None,
        PenaltyRow(1.5, 0.5, 0.5, ((3, 2.0),), frozenset({1}), history, 10),
        PenaltyRow(presence=1.0),
    ]
    filters = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 9, "typical_p": 0.9},
    ]
    return [
        row(0.6 * (i % 3), penalties[i % 2 + (i % 5 == 0)], i, i % 4, 7 * i, **filters[i % len(filters)])
        for i in range(60)
    ]


def test_a_row_does_not_depend_on_its_batch_mates():
    rows = mixed_rows(200)
    logits = torch.randn(len(rows), 200, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before), "the logits were changed"
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    assert together[7:31] == sample(logits[7:31], rows[7:31])


def test_a_large_vocabulary_in_slices_gives_each_row_its_own():
    rows = mixed_rows(49152)[:12]
    logits = torch.randn(12, 49152, generator=torch.Generator().manual_seed(0)) * 3
    assert sample(logits, rows) == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12)]


def test_equal_probabilities_at_the_edge_of_a_set_are_no_matter_of_rounding():
    """Half of the tokens have exactly half of the probability: alone and in any batch, the same are kept."""
    logits = torch.zeros(1024)
    logits[::2] = 1e-3
    for top_p in (0.25, 0.5):
        rows = [row(top_p=top_p, position=i) for i in range(40)]
        together = sample(logits.expand(40, -1), rows)
        assert together == [sample(logits[None], [one])[0] for one in rows]
        assert all(token % 2 == 0 for token in together)


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(2, 500)
    logits[0, [77, 300, 499]] = 3.0
    assert sample(logits, [row(0.0), row(0.0)]) == [77, 0]
    penalised = row(0.0, PenaltyRow(bias=((77, -1.0),)))
    assert sample(logits, [penalised, penalised]) == [300, 0]


def test_greedy_stays_greedy_with_penalties():
    logits = torch.tensor([[3.0, 2.9, 1.0]])
    history = torch.tensor([0, 0])
    assert sample(logits, [row(0.0, PenaltyRow(presence=0.2, history=history))]) == [1]
    assert sample(logits, [row(0.0, PenaltyRow(presence=0.2, history=history, prompt_tokens=2))]) == [0]
    assert sample(logits, [row(0.0, PenaltyRow(forbidden=frozenset({0, 1})))]) == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-320, 1e-10, 1e-3])
def test_a_tiny_temperature_is_greedy_and_not_a_nan(temperature, dtype):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    greedy = sample(logits, [row(0.0)])[0]
    for filters in ({"top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.9}, {}):
        token = sample(logits, [row(temperature, seed=4, **filters)])[0]
        assert logits[0, token] == logits[0, greedy]


def test_top_k_one_and_a_tiny_top_p_are_greedy():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    greedy = sample(logits, [row(0.0)])
    for case in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        for position in range(20):
            assert sample(logits, [row(5.0, position=position, **case)]) == greedy


def test_tokens_that_tie_at_the_edge_are_kept_alike():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    seen = {sample(logits, [row(top_k=2, position=i)])[0] for i in range(100)}
    assert seen == {1, 2, 3}


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7] = logits[0, 9] = -5.0
    for filters in ({}, {"top_p": 0.999999}, {"top_k": 50}, {"typical_p": 0.999999}):
        seen = {sample(logits, [row(9.0, seed=1, position=i, **filters)])[0] for i in range(50)}
        assert seen == {7, 9}
    barred = PenaltyRow(forbidden=frozenset({7}))
    assert {sample(logits, [row(9.0, barred, position=i)])[0] for i in range(20)} == {9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_only_the_row_that_is_not_finite_has_no_token(value, temperature):
    logits = torch.zeros(3, 50)
    logits[1, 20] = value
    options = row(temperature, PenaltyRow(bias=((4, 1.0),)))
    first, second, third = sample(logits, [options] * 3)
    assert second is None
    assert first == third == sample(logits[:1], [options])[0]
    assert sample(torch.full((1, 50), -torch.inf), [row(temperature)]) == [None]
    everything = PenaltyRow(forbidden=frozenset(range(50)))
    assert sample(torch.zeros(2, 50), [row(temperature, everything), row(0.0)]) == [None, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.nan},
        {"typical_p": 0.0},
        {"typical_p": math.nan},
    ],
)
def test_parameters_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sample(torch.zeros(1, 5), [row(**options)])


def test_no_rows_no_tokens_and_a_wrong_count_is_refused():
    assert sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="logits"):
        sample(torch.zeros(2, 5), [row()])
