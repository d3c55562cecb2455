"""What a worker learns of its pulls: latency and rate, what is old, and what cannot be told apart."""

from __future__ import annotations

import random

import pytest

from kvhive.worker.transfer_rate import STALE_AFTER_S, TransferRate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_told_before_the_first_pull() -> None:
    assert TransferRate(Clock()).measured() == (0.0, 0.0)


def test_latency_and_rate_are_told_apart_by_pulls_of_different_sizes() -> None:
    rate, rng = TransferRate(Clock()), random.Random(0)
    for _ in range(40):
        nbytes = rng.choice([1, 4, 16, 64]) * 1_000_000
        rate.observe(nbytes, (0.02 + nbytes / 5e8) * rng.uniform(0.95, 1.05))
    latency_s, bytes_per_s = rate.measured()
    assert latency_s == pytest.approx(0.02, rel=0.2)
    assert bytes_per_s == pytest.approx(5e8, rel=0.2)


def test_pulls_of_one_size_are_all_taken_for_rate() -> None:
    rate = TransferRate(Clock())
    for _ in range(5):
        rate.observe(1_000_000, 0.5)
    assert rate.measured() == (0.0, pytest.approx(2e6))


def test_a_network_that_changes_is_followed() -> None:
    rate, rng = TransferRate(Clock()), random.Random(1)
    for bytes_per_s in (1e9, 1e7):
        for _ in range(40):
            nbytes = rng.choice([1, 8, 64]) * 1_000_000
            rate.observe(nbytes, 0.01 + nbytes / bytes_per_s)
    assert rate.measured()[1] == pytest.approx(1e7, rel=0.3)


def test_what_was_measured_long_ago_is_not_told_any_more() -> None:
    """So that somebody tries again: who is taken for slow is never asked."""
    clock = Clock()
    rate = TransferRate(clock)
    rate.observe(1_000_000, 1.0)
    clock.now += STALE_AFTER_S - 1
    assert rate.measured()[1] > 0
    clock.now += 2
    assert rate.measured() == (0.0, 0.0)


def test_no_noise_makes_a_rate_or_a_latency_below_zero() -> None:
    rng = random.Random(2)
    for _ in range(200):
        rate = TransferRate(Clock())
        for _ in range(rng.randint(1, 6)):
            rate.observe(rng.randint(1, 100_000_000), rng.uniform(0.001, 1.0))
        latency_s, bytes_per_s = rate.measured()
        assert latency_s >= 0 and bytes_per_s > 0
