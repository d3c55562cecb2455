"""The worker's model of its own speed."""

from __future__ import annotations

import random

import pytest

from kvhive.worker.step_time import REFIT_EVERY, StepTimeModel


def test_it_knows_nothing_at_first() -> None:
    assert StepTimeModel().coefficients == (0.0, 0.0, 0.0)


def test_it_finds_the_coefficients_of_a_noisy_linear_machine() -> None:
    rng, model = random.Random(1), StepTimeModel()
    for _ in range(400):
        tokens, context = rng.choice([1, 8, 64, 512]), rng.randrange(4000)
        seconds = 0.02 + 1e-3 * tokens + 1e-7 * tokens * context
        model.observe(tokens, tokens * context, seconds * rng.uniform(0.95, 1.05))
    base, per_token, per_attention = model.coefficients
    assert base == pytest.approx(0.02, rel=0.1)
    assert per_token == pytest.approx(1e-3, rel=0.1)
    assert per_attention == pytest.approx(1e-7, rel=0.25)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = StepTimeModel()
    for factor in (1.0, 3.0):
        for i in range(1200):
            tokens = (1, 16, 256)[i % 3]
            model.observe(tokens, 0, factor * (0.01 + 1e-3 * tokens))
    assert model.coefficients[1] == pytest.approx(3e-3, rel=0.1)


def test_no_coefficient_is_ever_negative() -> None:
    rng, model = random.Random(2), StepTimeModel()
    for i in range(300):
        model.observe(rng.randrange(1, 100), rng.randrange(10**6), rng.uniform(1e-4, 1.0))
        if i % REFIT_EVERY == 0:
            assert min(model.coefficients) >= 0.0
    assert max(model.coefficients) > 0.0
