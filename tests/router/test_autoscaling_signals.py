"""Snapshots made of reports: work is counted once, where it arrives, whatever workers and controllers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhive.proto.index_schema import LoadReport, WorkerRecord, WorkerState
from kvhive.router.autoscaling_signals import FleetSignals, RouterCounts
from kvhive.router.worker_registry import WorkerView

SPEED = LoadReport(
    step_base_s=0.0, step_per_token_s=0.001, max_step_tokens=512, blocks_total=100, max_running=8
)


def view(
    worker_id: str = "w1", epoch: int = 1, state: WorkerState = WorkerState.SERVING, **load: Any
) -> WorkerView:
    """A worker as it reports; a token takes it a millisecond."""
    record = WorkerRecord(
        worker_id, "", epoch, "m", "", 16, 4096, 100, state, "cpu", 1, replace(SPEED, **load)
    )
    return WorkerView(record, 0.0)


def test_admitted_prompts_count_without_what_was_cached() -> None:
    signals = FleetSignals()
    signals.snapshot([view(prefix_queries=5000, admitted=5)], 0.0)  # before we came
    load = {"prefix_queries": 9000, "prefix_hits": 1000, "pulled_tokens": 500, "admitted": 10}
    snapshot = signals.snapshot([view(**load)], 10.0)
    assert snapshot.work_s_per_s == pytest.approx(2.5 / 10.0)
    assert snapshot.request_s == pytest.approx(0.5)
    assert signals.snapshot([view(**load)], 11.0).work_s_per_s == 0.0


def test_attention_counts_too() -> None:
    signals = FleetSignals()
    speed = {"step_per_attention_s": 1e-6}
    signals.snapshot([view(**speed)], 0.0)
    load = {"prefix_queries": 1000, "admitted": 1, "prefill_pairs": 500_000}
    assert signals.snapshot([view(**speed, **load)], 1.0).work_s_per_s == pytest.approx(1.5)


def test_what_waits_counts_when_it_comes_and_not_again_when_it_is_admitted() -> None:
    signals, total = FleetSignals(), 0.0
    for second, (waiting, queries) in enumerate([(0, 0), (3000, 0), (1000, 2000), (0, 3000), (0, 3000)]):
        load = {"waiting_tokens": waiting, "prefix_queries": queries, "admitted": queries // 1000}
        total += signals.snapshot([view(**load)], float(second)).work_s_per_s
        assert second == 0 or total == pytest.approx(3.0)


def test_waiting_prompts_are_worth_as_much_as_those_before_them() -> None:
    """Where three quarters are cached, a thousand waiting tokens are a quarter of a second."""
    signals = FleetSignals()
    signals.snapshot([view()], 0.0)
    load = {"prefix_queries": 4000, "prefix_hits": 3000, "admitted": 4}
    signals.snapshot([view(**load)], 1.0)
    assert signals.snapshot([view(waiting_tokens=1000, **load)], 2.0).work_s_per_s == pytest.approx(0.25)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_worker_that_begins_anew_is_counted_from_nothing(epoch: int) -> None:
    """Its count is smaller, whatever its epoch."""
    signals = FleetSignals()
    signals.snapshot([view(prefix_queries=9000, admitted=9)], 0.0)
    snapshot = signals.snapshot([view(epoch=epoch, prefix_queries=1000, admitted=1)], 1.0)
    assert snapshot.work_s_per_s == pytest.approx(1.0)


def test_a_redis_that_begins_anew_brings_no_work() -> None:
    """Workers register with it under new epochs and count on: what they had done before is no demand."""
    signals = FleetSignals()
    signals.snapshot([view(epoch=1, prefix_queries=9000, admitted=9)], 0.0)
    snapshot = signals.snapshot([view(epoch=2, prefix_queries=9100, admitted=10)], 1.0)
    assert snapshot.work_s_per_s == pytest.approx(0.1)


def test_a_worker_that_leaves_takes_nothing_away() -> None:
    """Known fault 86: what it had counted or promised is forgotten, and the demand falls to nothing."""
    signals = FleetSignals()
    signals.snapshot([view(), view("w2")], 0.0)
    signals.snapshot([view(), view("w2", waiting_tokens=5000, waiting=5)], 1.0)
    snapshot = signals.snapshot([view()], 2.0)
    assert snapshot.work_s_per_s == 0.0
    assert [worker.worker_id for worker in snapshot.workers] == ["w1"]
    assert signals.snapshot([view()], 302.0).idle_s == pytest.approx(301.0)


def test_a_burst_of_refused_and_cancelled_requests_leaves_no_demand() -> None:
    """Known fault 86: they waited, were cancelled, and never were admitted; then silence."""
    signals = FleetSignals()
    signals.snapshot([view()], 0.0)
    burst = signals.snapshot([view(waiting=50, waiting_tokens=50_000)], 1.0)
    assert burst.work_s_per_s == pytest.approx(50.0)
    for second in range(2, 5):
        quiet = signals.snapshot([view()], float(second))
        assert (quiet.work_s_per_s, quiet.serving()[0].queued_s) == (0.0, 0.0)
    assert quiet.idle_s == pytest.approx(3.0)


def test_the_share_in_time_is_that_of_all_routers_and_of_late() -> None:
    signals = FleetSignals()
    signals.hear_routers({"a": RouterCounts(1000, 0), "b": RouterCounts(0, 0)}, 0.0)
    assert signals.snapshot([view()], 0.0).ttft_share is None  # nobody knows when those were
    signals.hear_routers({"a": RouterCounts(1090, 90), "b": RouterCounts(10, 0)}, 1.0)
    assert signals.snapshot([view()], 1.0).ttft_share == pytest.approx(0.9)
    signals.hear_routers({"a": RouterCounts(50, 50), "b": RouterCounts(10, 0)}, 3001.0)  # begun anew, later
    assert signals.snapshot([view()], 3001.0).ttft_share == pytest.approx(1.0, abs=0.01)


def test_in_silence_nobody_knows_whether_requests_are_in_time() -> None:
    signals = FleetSignals()
    signals.hear_routers({"a": RouterCounts()}, 0.0)
    signals.hear_routers({"a": RouterCounts(2, 1)}, 1.0)
    assert signals.snapshot([view()], 400.0).ttft_share == pytest.approx(0.5)
    assert signals.snapshot([view()], 800.0).ttft_share is None


def test_held_requests_are_what_the_routers_hold_now() -> None:
    signals = FleetSignals()
    signals.hear_routers({"a": RouterCounts(held=3), "b": RouterCounts(held=2)}, 0.0)
    assert signals.snapshot([], 0.0).held == 5
    signals.hear_routers({"a": RouterCounts(held=1)}, 1.0)
    assert signals.snapshot([], 1.0).held == 1


def test_workers_that_start_are_there_before_they_register_and_teach_how_long_it_takes() -> None:
    signals = FleetSignals()
    first = signals.snapshot([view()], 0.0, {"w2": 0.0})
    assert [worker.state for worker in first.workers] == [WorkerState.SERVING, WorkerState.STARTING]
    starting = view("w2", state=WorkerState.STARTING)
    assert signals.snapshot([view(), starting], 20.0, {"w2": 0.0}).present() == 2
    served = signals.snapshot([view(), view("w2")], 40.0)
    assert (served.startup_s, served.present()) == (40.0, 2)
    third = signals.snapshot([view(), view("w2")], 50.0, {"w3": 50.0})
    assert third.workers[-1].ready_at == 90.0


def test_a_pool_that_took_blocks_from_somebody_is_full() -> None:
    signals = FleetSignals()
    signals.snapshot([view(blocks_live=60, preemptions=3)], 0.0)
    assert signals.snapshot([view(blocks_live=60, preemptions=3)], 1.0).workers[0].live_share == 0.6
    assert signals.snapshot([view(blocks_live=60, preemptions=4)], 2.0).workers[0].live_share == 1.0


def test_draining_workers_are_shown_and_do_not_count() -> None:
    snapshot = FleetSignals().snapshot([view(), view("w2", state=WorkerState.DRAINING)], 0.0)
    assert (len(snapshot.workers), snapshot.present(), len(snapshot.serving())) == (2, 1, 1)


def test_time_that_stands_still_or_goes_back_loses_no_work() -> None:
    signals = FleetSignals()
    signals.snapshot([view()], 10.0)
    load = {"prefix_queries": 1000, "admitted": 1}
    for now in (10.0, 9.0):
        assert signals.snapshot([view(**load)], now).work_s_per_s == 0.0
    assert signals.snapshot([view(**load)], 11.0).work_s_per_s == pytest.approx(0.5)
