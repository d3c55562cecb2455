"""The router's own view of load between two reports of a worker."""

from __future__ import annotations

import numpy as np
import pytest

from kvhive.router.load_tracker import COLD_HALF_LIFE_S, MAX_ENDED, LoadTracker, per_second
from kvhive.router.pool_use import SETTLE_S


def test_a_request_counts_until_its_first_token() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 100, now=10.0)
    assert loads.queue_tokens("w1", reported=5, reported_at=9.0) == 105
    assert loads.queue_tokens("w2", reported=5, reported_at=9.0) == 5
    loads.first_token("a", now=11.0)
    assert loads.queue_tokens("w1", reported=5, reported_at=9.0) == 5


def test_a_report_that_contains_the_request_is_not_added_to() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 100, now=10.0)
    assert loads.queue_tokens("w1", reported=100, reported_at=10.5) == 100
    loads.first_token("a", now=11.0)
    assert loads.queue_tokens("w1", reported=100, reported_at=10.5) == 0
    assert loads.queue_tokens("w1", reported=0, reported_at=11.5) == 0
    loads.first_token("a", now=12.0)
    assert loads.queue_tokens("w1", reported=50, reported_at=11.5) == 50, "later tokens change nothing"


def test_a_request_that_is_over_is_taken_off_the_report_that_has_it() -> None:
    """A short answer ends between two reports; its worker is idle, whatever the last one says."""
    loads = LoadTracker()
    loads.reserve("a", "w1", 900, now=10.0)
    loads.first_token("a", now=11.0)
    loads.finish("a", now=11.1)
    assert loads.queue_tokens("w1", reported=900, reported_at=10.5) == 0
    assert loads.queue_tokens("w1", reported=900, reported_at=10.5, per_token_s=0.001) == 400
    assert loads.queue_tokens("w1", reported=70, reported_at=11.5) == 70, "that of others"
    loads.reserve("b", "w1", 900, now=12.0)
    loads.first_token("b", now=12.5)
    loads.finish("b", now=12.6)
    assert loads.queue_tokens("w1", reported=70, reported_at=11.5) == 70, "no report has had it"


def test_what_ended_is_forgotten_with_the_next_report_or_its_worker() -> None:
    loads = LoadTracker()
    for i in range(2 * MAX_ENDED):
        loads.reserve(f"r{i}", "w1", 10, now=1.0)
        loads.first_token(f"r{i}", now=2.0)
        loads.finish(f"r{i}", now=2.5)
    assert loads.queue_tokens("w1", reported=20 * MAX_ENDED, reported_at=1.5) == 10 * MAX_ENDED
    assert loads.queue_tokens("w1", reported=0, reported_at=3.0) == 0
    assert not loads._ended["w1"]
    loads.drop("w1")
    assert not loads._ended


def test_finishing_is_idempotent_and_frees_everything() -> None:
    """Nothing is counted for ever, however a request ended."""
    loads = LoadTracker()
    for i in range(100):
        loads.reserve(f"r{i}", "w1", 10, now=1.0)
        loads.finish(f"r{i}", now=1.5)
        loads.finish(f"r{i}", now=1.5)
        loads.first_token(f"r{i}", now=2.0)
    assert loads.in_flight("w1") == 0 and loads.queue_tokens("w1", 0, 0.0) == 0
    assert not loads._reservations and not loads._worker_of


def test_a_request_that_moves_counts_only_where_it_went() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 100, now=1.0)
    loads.reserve("a", "w2", 100, now=2.0)
    assert (loads.in_flight("w1"), loads.in_flight("w2")) == (0, 1)


def test_recent_cold_work_fades() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 1000, now=0.0)
    assert loads.recent_cold_tokens("w1", COLD_HALF_LIFE_S) == pytest.approx(500)
    loads.drop("w1")
    assert loads.recent_cold_tokens("w1", 0.0) == 0.0


def test_cold_work_of_other_routers_is_seen_in_the_reports_and_own_is_not_counted_twice() -> None:
    """A worker's count of all uncached tokens confirms what this router sent."""
    mine, other = LoadTracker(), LoadTracker()
    for loads in (mine, other):
        loads.report_cold("w1", 5000, now=0.0)
        assert loads.recent_cold_tokens("w1", 0.0) == 0.0, "what was before this router is unknown"
    mine.reserve("a", "w1", 100, now=1.0)
    assert (mine.recent_cold_tokens("w1", 1.0), other.recent_cold_tokens("w1", 1.0)) == (100.0, 0.0)
    for loads in (mine, other):
        loads.report_cold("w1", 5100, now=1.0)
        loads.report_cold("w1", 5100, now=1.0)
        assert loads.recent_cold_tokens("w1", 1.0) == pytest.approx(100.0)


def test_a_new_process_counts_from_nothing() -> None:
    loads = LoadTracker()
    loads.report_cold("w1", 5000, now=0.0)
    loads.report_cold("w1", 30, now=1.0)
    loads.report_cold("w1", 50, now=1.0)
    assert loads.recent_cold_tokens("w1", 1.0) == pytest.approx(20.0)


def test_a_report_made_while_a_request_was_on_its_way_does_not_confirm_it() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 100, now=10.0)
    assert loads.queue_tokens("w1", reported=0, reported_at=10.0 + SETTLE_S / 2) == 100
    assert loads.queue_tokens("w1", reported=0, reported_at=10.0 + 2 * SETTLE_S) == 0


def test_it_says_of_whom_something_changed() -> None:
    loads = LoadTracker()
    loads.reserve("a", "w1", 100, now=1.0)
    loads.reserve("a", "w2", 100, now=1.0)
    assert loads.take_changed() == {"w1", "w2"} and loads.take_changed() == set()
    loads.first_token("a", 2.0)
    loads.first_token("a", 3.0)
    assert loads.take_changed() == {"w2"}
    loads.first_token("a", 4.0)
    assert loads.take_changed() == set()
    loads.finish("a", now=2.0)
    assert loads.take_changed() == {"w2"}


def test_a_prompt_that_is_ready_takes_off_no_more_than_can_have_been_computed() -> None:
    """It was almost done when the worker reported, and behind it another one waits."""
    loads = LoadTracker()
    loads.reserve("long", "w1", 40_000, now=0.0)
    loads.reserve("next", "w1", 90_000, now=1.0)
    loads.first_token("long", now=5.1)
    assert loads.queue_tokens("w1", reported=91_000, reported_at=5.0, per_token_s=1e-4) == 90_001
    assert loads.queue_tokens("w1", reported=91_000, reported_at=5.0) == 51_000, "at an unknown speed"


def test_a_rate_of_cold_work_is_right_before_its_memory_is_full() -> None:
    """A hundred tokens a second, for a second, a minute and an hour."""
    for seconds in (1, 60, 3600):
        loads = LoadTracker()
        for at in range(seconds):
            loads.reserve(f"r{at}", "w1", 100, now=float(at))
        recent = np.array([loads.recent_cold_tokens("w1", float(seconds))])
        watched = np.array([float(seconds) - loads.cold_since("w1", float(seconds))])
        (rate,) = per_second(recent, watched)
        assert rate == pytest.approx(100.0, rel=0.03) or (seconds == 1 and rate < 100.0)
