"""How long running sequences are expected to hold their blocks."""

from __future__ import annotations

import pytest

from kvhive.worker.answer_lengths import FIRST_GUESS, FORECAST_EVERY_S, AnswerLengths, PoolForecast
from kvhive.worker.sequence import SamplingParams, Sequence


def running(prompt_tokens: int, generated: int, max_tokens: int) -> Sequence:
    seq = Sequence("r", [0] * prompt_tokens, prompt_tokens, SamplingParams(max_tokens))
    seq.tokens += [0] * generated
    return seq


def answers_of(*lengths: int) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.add(length)
    return answers


def test_the_mean_is_exact_at_first_and_follows_what_is_new() -> None:
    assert answers_of().mean == FIRST_GUESS
    assert answers_of(100).mean == pytest.approx(100.0)
    assert 100 < answers_of(100, 300).mean < 300
    assert answers_of(*[100] * 50, *[500] * 200).mean == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize(("generated", "expected"), [(0, 100), (99, 100), (250, 250), (990, 10)])
def test_a_long_answer_is_expected_to_go_on_as_long_again_within_its_bound(
    generated: int, expected: float
) -> None:
    assert answers_of(100).remaining(running(50, generated, 1000)) == pytest.approx(expected)


def test_a_forecast_weighs_sequences_by_what_they_hold() -> None:
    """A short one with much to come beside a long one that is nearly done."""
    answers = answers_of(100)
    both = [running(100, 0, 1000), running(880, 10, 20)]
    forecast = answers.forecast(both, now=0.0)
    assert forecast == PoolForecast(100.0, pytest.approx(110.0), pytest.approx((100 * 100 + 890 * 10) / 990))
    assert AnswerLengths().forecast([], now=0.0) == PoolForecast(FIRST_GUESS, 0.0, 0.0)


def test_a_forecast_is_kept_for_a_while() -> None:
    """It is asked for at every step, and read at every heartbeat."""
    answers = answers_of(100)
    first = answers.forecast([running(100, 0, 1000)], now=0.0)
    other = [running(100, 0, 30)]
    assert answers.forecast(other, now=FORECAST_EVERY_S / 2) is first
    assert answers.forecast(other, now=FORECAST_EVERY_S).growth_tokens == 30.0
    idle = answers.forecast([], now=1.1 * FORECAST_EVERY_S)
    assert idle.growth_tokens == idle.release_tokens == 0.0, "an engine at rest reports no more"
