"""Simulated fleets whose size follows the load: an hour of few workers, by the command and by its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from trace_files import opened, write_trace

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.proto.errors import ConfigError
from kvhive.proto.index_schema import WorkerState
from kvhive.router.policies import make_policy
from kvhive.scripts.cli import cli
from kvhive.scripts.sim_clairvoyant import Job, find_clairvoyant, jobs_of
from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_elastic import ElasticSimulation
from kvhive.scripts.sim_quick import QuickFleet
from kvhive.scripts.sim_run import BlockIds, Fleet
from kvhive.scripts.sim_scaling import ElasticFleet, Scaling, in_goal, scale, scaling_report
from kvhive.scripts.trace_arrivals import Pace, plan_arrivals
from kvhive.scripts.trace_diurnal import Diurnal, make_trace, parse_diurnal
from kvhive.scripts.trace_format import Trace

COST = CostModel(1000.0, 0.03, 1e-9, 16_384, 256)
CONFIG = AutoscalingConfig(enabled=True, max_workers=12, ttft_goal_s=60.0, interval_s=10.0)


def day(**settings: Any) -> Trace:
    """An hour of little work."""
    return make_trace(Diurnal(**{"hours": 1.0, "low": 1.5, "high": 3.0, **settings}), COST.prefill_s, seed=1)


def fleet_of(kind: str, trace: Trace, workers: int, goal_s: float = 60.0) -> ElasticFleet:
    """A fleet of either kind, with pools of 500,000 tokens."""
    fleet = Fleet(workers, 488, 1024, COST, coarse=10.0)
    if kind == "quick":
        return QuickFleet(trace, fleet, goal_s)
    schedule = plan_arrivals(trace, Pace(), workers, COST.prefill_s)
    return ElasticSimulation(
        trace, BlockIds(trace, 1024), schedule, fleet, make_policy("kv_aware", 0), goal_s
    )


@pytest.mark.parametrize("kind", ["quick", "real"])
def test_a_fleet_grows_with_the_load_and_keeps_the_goal(kind: str) -> None:
    """From one worker, which is too few, with the real policy; everybody is answered."""
    trace = day(hours=0.6, low=2.0, high=5.0)
    fleet = fleet_of(kind, trace, 1)
    scaling = scale(fleet, CONFIG, startup_s=60.0)
    report = scaling_report(fleet, scaling)
    assert report.requests == len(trace.requests) and report.refused == 0
    assert all(served.finished_at >= served.first_token_at > 0 for served in fleet.served)
    assert report.least_workers == 1 and 5 <= report.most_workers <= 12
    assert report.in_goal_share > 0.8
    # More than the work, less than the most workers all the time.
    assert 2.0 * report.hours < report.worker_hours < report.most_workers * report.hours
    assert report.reasons.get("prefill", 0) >= 1


def test_both_fleets_tell_the_same_story() -> None:
    """The quick one leaves out steps, batches and heartbeats: hits and waits stay near to the real one's."""
    trace, reports = day(hours=0.5), {}
    for kind in ("quick", "real"):
        fleet = fleet_of(kind, trace, 4)
        fleet.begin()
        fleet.advance(1e9)
        reports[kind] = scaling_report(fleet, Scaling([(0.0, 4)]))
    quick, real = reports["quick"], reports["real"]
    assert quick.token_hit_rate == pytest.approx(real.token_hit_rate, abs=0.08)
    assert quick.ttft_p50_s == pytest.approx(real.ttft_p50_s, rel=0.3)
    assert quick.worker_hours == pytest.approx(real.worker_hours, rel=0.02)


@pytest.mark.parametrize("kind", ["quick", "real"])
def test_a_worker_that_is_let_go_ends_its_streams_and_starting_ones_go_first(kind: str) -> None:
    """Known fault 87: the ready ones stay."""
    fleet = fleet_of(kind, day(hours=0.1, high=6.0, low=5.0), 4)
    fleet.begin()
    fleet.advance(120.0)
    fleet.resize(6, 60.0)
    assert len(fleet.asked_for()) == 2
    fleet.resize(4, 60.0)
    assert not fleet.asked_for()
    serving = [view for view in fleet.views() if view.record.state is WorkerState.SERVING]
    assert len(serving) == 4
    fleet.resize(3, 60.0)
    draining = {v.record.worker_id for v in fleet.views() if v.record.state is WorkerState.DRAINING}
    arrived = len(fleet.served)
    fleet.advance(1e9)
    assert all(served.finished_at > 0 for served in fleet.served)
    assert not draining & {served.worker_id for served in fleet.served[arrived:]}
    paid_s = fleet.paid_s()
    assert fleet.now * 3 < paid_s < fleet.now * 4


@pytest.mark.parametrize("kind", ["quick", "real"])
def test_requests_are_held_while_there_is_nobody(kind: str) -> None:
    """To zero and back: an hour of silence between two requests, the second waits for a start."""
    trace = day()
    first, second = trace.requests[0], trace.requests[-1]
    assert second.arrival - first.arrival > 1800
    fleet = fleet_of(kind, Trace("t", trace.block_size, False, [first, second]), 1)
    config = replace(CONFIG, min_workers=0, max_workers=1, idle_s=300.0)
    scaling = scale(fleet, config, startup_s=60.0)
    assert [count for _, count in scaling.targets] == [1, 0, 1]
    assert list(scaling.reasons) == ["idle", "held"]
    waited = fleet.served[1].first_token_at - fleet.served[1].arrived_at
    alone = COST.prefill_s(second.prompt_tokens)
    assert 60.0 <= waited - alone <= 81.0
    assert fleet.paid_s() < 1800


def test_the_clairvoyant_needs_fewer_than_anybody_and_keeps_the_goal() -> None:
    trace = day(hours=0.5)
    jobs = jobs_of(trace, plan_arrivals(trace, Pace(), 1, COST.prefill_s), COST)
    found = find_clairvoyant(jobs, 60.0, 0.95, 300.0, 12)
    assert found.in_goal_share >= 0.95
    fleet = fleet_of("quick", trace, 3)
    report = scaling_report(fleet, scale(fleet, CONFIG, 60.0))
    assert 0 < found.worker_hours < report.worker_hours


def test_the_clairvoyant_computes_no_block_twice() -> None:
    request = day().requests[0]
    turns = [(0.0, 4, (0, 2, 50, 2)), (10.0, 7, (0, 2, 50, 5)), (20.0, 4, (0, 2, 50, 2))]
    rows = [
        type(request)(at, n, 0, 0.0, blocks * 1024, 4, runs) for n, (at, blocks, runs) in enumerate(turns)
    ]
    trace = Trace("t", 1024, False, rows)
    jobs = jobs_of(trace, plan_arrivals(trace, Pace(), 1, COST.prefill_s), COST)
    wanted = [COST.prefill_s(4096), COST.prefill_s(3072, 4096), COST.prefill_s(1, 4095)]
    assert [job.work_s for job in jobs] == wanted


def test_the_clairvoyant_s_counts_are_those_by_hand() -> None:
    """Jobs of 20 s, a goal of 25 s: two come at once in the second window, none in the fourth."""
    jobs = [Job(10.0, 20.0), Job(700.0, 20.0), Job(700.0, 20.0), Job(1300.0, 20.0), Job(2500.0, 99.0)]
    found = find_clairvoyant(jobs, 25.0, 0.99, 600.0, 12)
    assert found.counts == (1, 2, 1, 1, 1)  # the last one is late whatever there is
    assert found.in_goal_share == 0.8
    assert found.worker_hours == 1.0


def test_what_a_window_leaves_over_is_there_in_the_next() -> None:
    """A worker is busy until 130 s with what came at 50 s; a second one is needed for the one of 105 s."""
    jobs = [Job(50.0, 80.0), Job(105.0, 80.0)]
    assert find_clairvoyant(jobs, 90.0, 0.99, 100.0, 12).counts == (1, 2)
    assert find_clairvoyant(jobs, 110.0, 0.99, 100.0, 12).counts == (1, 1)


def test_a_day_is_the_same_for_the_same_seed_and_follows_its_curve() -> None:
    shape = Diurnal(hours=4.0, low=2.0, high=20.0)
    first, again = (make_trace(shape, COST.prefill_s, seed=3) for _ in range(2))
    assert first.requests == again.requests
    assert make_trace(shape, COST.prefill_s, seed=4).requests != first.requests
    arrivals = [request.arrival for request in first.requests]
    assert arrivals == sorted(arrivals)
    night = sum(arrival < 2400 for arrival in arrivals)
    noon = sum(7200 <= arrival < 9600 for arrival in arrivals)
    assert 4 * night < noon
    assert shape.load(1200.0) == pytest.approx(2.0) and shape.load(8400.0) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diurnal:hour=3", "diurnal: hour: must be one of hours, low, high"),
        ("diurnal:hours=0", "diurnal: hours: must be a number of 0.01 to 240, is '0'"),
        ("diurnal:hours=nan", "diurnal: hours: must be a number"),
        ("diurnal:low=many", "diurnal: low: must be a number"),
        ("diurnal:low=9,high=3", "diurnal: high: must be at least low (9), is 3"),
    ],
)
def test_a_day_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="diurnal") as error:
        parse_diurnal(text)
    assert message in str(error.value)


def command(*arguments: str) -> Any:
    """Run `kvhive simulate --autoscale` on a small hour."""
    settings = (
        "--block-size",
        "1024",
        "--prefill-tokens-per-s",
        "1000",
        "--step-ms",
        "30",
        "--slo-ttft",
        "60",
    )
    return CliRunner().invoke(cli, ["simulate", *arguments, "--autoscale", "--quick", *settings])


def test_the_command_prints_one_object_twice_the_same() -> None:
    small = ("diurnal:hours=0.5,low=1,high=2", "--set", "autoscaling.max_workers=9", "--window", "600")
    first, second = (command(*small, "--workers", "3", "--json") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    report = json.loads(first.stdout)
    assert report["worker_hours_ratio"] == pytest.approx(
        report["worker_hours"] / report["clairvoyant_worker_hours"], rel=1e-6
    )
    assert {"in_goal_share", "flaps_per_hour", "direction_changes", "reasons"} <= report.keys()


def test_the_command_prints_lines_for_people() -> None:
    result = command("diurnal:hours=0.2,low=1,high=2", "--window", "600")
    assert result.exit_code == 0
    assert "worker-hours" in result.stdout and "clairvoyant minimum" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diurnal:x=1"], "diurnal: x: must be one of"),
        (["nowhere.jsonl"], "TRACE: must be a file, or diurnal"),
        (["diurnal", "--set", "workers.count=3"], "--set workers.count=3: must be autoscaling.KEY=VALUE"),
        (["diurnal", "--set", "autoscaling.ttft_goal_s=3"], "the goal is that of --slo-ttft"),
        (["diurnal", "--set", "autoscaling.max_worker=3"], "did you mean 'max_workers'?"),
        (["diurnal", "--set", "autoscaling.min_workers=9"], "autoscaling.max_workers: must be at least"),
    ],
)
def test_a_wrong_word_is_named(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_the_quick_fleet_refuses_traces_it_cannot_play(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [opened(0.0, 168, [0, 11])])
    result = command(str(path))
    assert "--quick: only for `diurnal` traces" in str(result.exception)


def test_in_goal_means_answered_in_time() -> None:
    fleet = fleet_of("quick", day(), 4)
    fleet.begin()
    fleet.advance(600.0)
    served = fleet.served[0]
    assert in_goal(served, 60.0)
    served.first_token_at = -1.0
    assert not in_goal(served, 60.0)
