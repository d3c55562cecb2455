"""The real policy behind the controller's eyes: what it is shown, and what it may not forget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_records import record

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.proto.index_schema import LoadReport, WorkerState
from kvhive.router.autoscaling_policy import Reason
from kvhive.router.autoscaling_signals import FleetSignals, RouterCounts
from kvhive.router.autoscaling_snapshot import FleetSnapshot
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.autoscaler import Autoscaler
from kvhive.scripts.fleet_plan import Stage

CONFIG = AutoscalingConfig(enabled=True, min_workers=1, max_workers=4, ttft_goal_s=0.5, startup_s=1.0)


def view(worker_id: str, queued_tokens: int, now: float, asked: int = 0, **changes: object) -> WorkerView:
    """A worker that computes a thousand tokens a second."""
    load = LoadReport(
        blocks_total=1000,
        queued_prefill_tokens=queued_tokens,
        waiting_tokens=queued_tokens,
        waiting=queued_tokens // 500,
        running=1 if queued_tokens else 0,
        max_running=16,
        step_per_token_s=0.001,
        max_step_tokens=512,
        prefix_queries=asked,
        admitted=asked // 500,
    )
    return WorkerView(replace(record(worker_id, load=load), **changes), now)  # type: ignore[arg-type]


def wanted_under_load(scaler: Autoscaler, seconds: int, stages: dict[str, Stage]) -> list[int]:
    """What is wanted, second by second, while a queue of ten seconds grows by three each."""
    return [
        scaler.decide([view("w1", 10_000 + 3000 * t, float(t), 1000 * t)], stages, float(t)).target
        for t in range(seconds)
    ]


def test_a_queue_that_grows_asks_for_more_within_the_bounds() -> None:
    scaler = Autoscaler(CONFIG, 1, dict)
    wanted = wanted_under_load(scaler, 60, {"w1": "serving"})
    assert wanted[0] < wanted[-1] == 4 and wanted == sorted(wanted)


def test_it_begins_at_what_was_wanted_not_at_what_a_restarted_controller_sees_first() -> None:
    scaler = Autoscaler(CONFIG, 3, dict)
    assert scaler.decide([], {}, 0.0).target == 3
    assert scaler.decide([view("w1", 0, 1.0)], {"w1": "serving", "w2": "pending"}, 1.0).target == 3


def test_between_two_decisions_the_last_one_stands() -> None:
    scaler = Autoscaler(replace(CONFIG, interval_s=5.0), 1, dict)
    first = scaler.decide([view("w1", 0, 0.0)], {"w1": "serving"}, 0.0)
    assert scaler.decide([view("w1", 90_000, 4.9)], {"w1": "serving"}, 4.9) is first
    assert scaler.decide([view("w1", 90_000, 5.1)], {"w1": "serving"}, 5.1) is not first


def test_held_requests_bring_a_first_worker_back_from_zero() -> None:
    counts = {"router": RouterCounts()}
    scaler = Autoscaler(replace(CONFIG, min_workers=0, idle_s=10.0), 0, lambda: counts)
    assert scaler.decide([], {}, 0.0).target == 0
    counts["router"] = RouterCounts(held=3)
    decision = scaler.decide([], {}, 2.0)
    assert decision.target >= 1 and decision.reason is Reason.HELD


def test_a_worker_that_drains_is_not_counted_although_the_index_says_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = Autoscaler(CONFIG, 2, dict)
    views = [view("w1", 0, 0.0), view("w2", 0, 0.0, state=WorkerState.SERVING), view("w9", 0, 0.0)]
    seen: list[tuple[str, WorkerState]] = []
    whole = FleetSignals.snapshot

    def spy(self: FleetSignals, shown: list[WorkerView], now: float, asked_for: Any) -> FleetSnapshot:
        seen.extend((each.record.worker_id, each.record.state) for each in shown)
        return whole(self, shown, now, asked_for)

    monkeypatch.setattr(FleetSignals, "snapshot", spy)
    scaler.decide(views, {"w1": "serving", "w2": "draining"}, 0.0)
    assert seen == [("w1", WorkerState.SERVING), ("w2", WorkerState.DRAINING)], "w9 has no actor of ours"
