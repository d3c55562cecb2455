"""A failing worker is skipped, then tried by one request at a time; its first success ends all that."""

from __future__ import annotations

from kvhive.router.worker_health import MOST_DOUBLINGS, WorkerHealth


def test_a_failure_is_a_pause_and_then_one_trial_at_a_time() -> None:
    health = WorkerHealth(5.0)
    assert not health and health.failed("w1", now=100.0) == 5.0
    assert health.pause_s("w1", 102.0) == 3.0 and health.pause_s("w2", 102.0) == 0.0
    assert health.pause_s("w1", 105.0) == 0.0 and not health.is_tried("w1", 105.0)
    health.placed("w1", 105.0)
    assert health.is_tried("w1", 109.9) and not health.is_tried("w1", 110.0), "a trial that says nothing ends"
    health.succeeded("w1", 111.0)
    assert not health


def test_requests_that_fail_together_are_one_failure() -> None:
    health = WorkerHealth(5.0)
    health.failed("w1", 100.0)
    assert [health.failed("w1", 100.0 + i) for i in range(5)] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert health.failed("w1", 105.0) == 10.0, "the trial failed too"


def test_the_pause_doubles_up_to_a_bound() -> None:
    health, now, pauses = WorkerHealth(1.0), 0.0, []
    for _ in range(MOST_DOUBLINGS + 3):
        pauses.append(health.failed("w1", now))
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]


def test_what_was_there_before_the_failure_proves_nothing_during_the_pause() -> None:
    health = WorkerHealth(5.0)
    health.failed("w1", 100.0)
    health.succeeded("w1", 101.0)
    assert health.pause_s("w1", 101.0) == 4.0


def test_a_new_process_begins_without_a_stain_and_no_pause_remembers_nothing() -> None:
    health = WorkerHealth(5.0)
    health.failed("w1", 100.0)
    health.forget("w1")
    health.forget("w1")
    assert not health and health.failed("w1", 101.0) == 5.0
    careless = WorkerHealth(0.0)
    assert careless.failed("w1", 100.0) == 0.0 and not careless
