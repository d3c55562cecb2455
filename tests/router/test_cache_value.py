"""A cache is worth what it saved lately: hits in seconds of prefill, half forgotten in ten minutes."""

from __future__ import annotations

import pytest

from kvhive.proto.index_schema import LoadReport
from kvhive.router.cache_value import HALF_LIFE_S, CacheValues


def load(hits: int, per_token_s: float = 0.001) -> LoadReport:
    return LoadReport(prefix_hits=hits, step_per_token_s=per_token_s)


def test_hits_count_in_the_seconds_that_they_saved_there() -> None:
    values = CacheValues()
    for hits in (0, 4000):
        values.note("fast", 1, load(hits, 0.001), 0.0)
        values.note("slow", 1, load(hits, 0.01), 0.0)
    assert values.value_s("fast", 0.0) == pytest.approx(4.0)
    assert values.value_s("slow", 0.0) == pytest.approx(40.0)
    assert values.value_s("slow", HALF_LIFE_S) == pytest.approx(20.0)
    assert values.value_s("unheard of", 0.0) == 0.0


def test_what_it_hit_before_anybody_listened_does_not_count() -> None:
    values = CacheValues()
    values.note("w1", 1, load(1_000_000), 0.0)
    assert values.value_s("w1", 0.0) == 0.0


def test_a_restarted_worker_and_one_that_counts_anew_begin_with_nothing() -> None:
    values = CacheValues()
    values.note("w1", 1, load(0), 0.0)
    values.note("w1", 1, load(5000), 1.0)
    values.note("w1", 2, load(5000), 2.0)
    assert values.value_s("w1", 2.0) == 0.0
    values.note("w1", 2, load(6000), 3.0)
    values.note("w1", 2, load(10), 4.0)
    assert values.value_s("w1", 4.0) == 0.0


def test_who_has_gone_is_forgotten_and_a_clock_that_goes_back_makes_nothing_worth_more() -> None:
    values = CacheValues()
    values.note("w1", 1, load(0), 100.0)
    values.note("w1", 1, load(1000), 100.0)
    assert values.value_s("w1", 50.0) == pytest.approx(1.0)
    values.retain({"w2"})
    assert values.value_s("w1", 100.0) == 0.0
