"""kvhive simulate --autoscale: what the policy would have made of a trace, and what was possible."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

import yaml

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.proto.config import parse_config
from kvhive.proto.errors import ConfigError
from kvhive.router.policies import make_policy, policy_names
from kvhive.scripts.no_collector import no_collector
from kvhive.scripts.progress import Progress, show_progress
from kvhive.scripts.sim_clairvoyant import Clairvoyant, Job, find_clairvoyant, jobs_of, jobs_served
from kvhive.scripts.sim_elastic import ElasticSimulation
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.sim_quick import QuickFleet, check_quick
from kvhive.scripts.sim_run import BlockIds, Fleet
from kvhive.scripts.sim_scaling import ElasticFleet, ScalingReport, scale, scaling_report
from kvhive.scripts.trace_arrivals import Pace, Schedule, plan_arrivals
from kvhive.scripts.trace_format import Trace
from kvhive.scripts.trace_source import load_trace

TELL_EVERY = 500
"""Requests between two words on the progress."""


def run(source: str, options: SimulateOptions, as_json: bool) -> None:
    """Simulate and print. Raises KvhiveError, OSError."""
    config = autoscaling_config(options)
    with show_progress(sys.stderr) as tell, no_collector():
        tell(source, "reading")
        trace = load_trace(source, options)
        tell(source, f"{len(trace.requests)} requests")
        report = simulate(trace, config, options, tell)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print("\n".join(lines(report)))


def autoscaling_config(options: SimulateOptions) -> AutoscalingConfig:
    """The policy's settings: the defaults, `--set` and the goal of `--slo-ttft`. Raises ConfigError."""
    section: dict[str, object] = {"enabled": True, "ttft_goal_s": options.slo_ttft_s}
    for override in options.overrides:
        key, equals, text = override.partition("=")
        group, _, name = key.partition(".")
        if not equals or group != "autoscaling":
            raise ConfigError(f"--set {override}: must be autoscaling.KEY=VALUE")
        if name == "ttft_goal_s":
            raise ConfigError(f"--set {override}: the goal is that of --slo-ttft")
        try:
            section[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: not valid YAML") from error
    return parse_config({"autoscaling": section}).autoscaling


def simulate(
    trace: Trace, config: AutoscalingConfig, options: SimulateOptions, tell: Progress
) -> ScalingReport:
    """Play the trace, and play it for the clairvoyant if its window is not 0. Raises ConfigError."""
    fleet = make_fleet(trace, options)
    total = len(trace.requests)

    def saying(subject: str) -> Callable[[int], None]:
        def say(done: int) -> None:
            if done % TELL_EVERY == 0 or done == total:
                tell(subject, f"simulating {done} of {total}")

        return say

    report = scaling_report(fleet, scale(fleet, config, options.startup_s, saying("autoscaling")))
    if not options.window_s:
        return report
    tell("clairvoyant", "trying")

    def fewest(jobs: list[Job]) -> Clairvoyant:
        goal_s, share = config.ttft_goal_s, config.ttft_goal_share
        return find_clairvoyant(jobs, goal_s, share, options.window_s, config.max_workers)

    found = fewest(jobs_served(fleet.served, options.cost))
    ideal = None if trace.closed else fewest(jobs_of(trace, _schedule(trace, options), options.cost))
    return dataclasses.replace(
        report,
        clairvoyant_worker_hours=found.worker_hours,
        clairvoyant_in_goal_share=found.in_goal_share,
        ideal_worker_hours=ideal.worker_hours if ideal else None,
        worker_hours_ratio=report.worker_hours / found.worker_hours,
    )


def _schedule(trace: Trace, options: SimulateOptions) -> Schedule:
    pace = Pace(options.rate, options.load)
    return plan_arrivals(trace, pace, options.workers, options.cost.prefill_s, options.seed)


def make_fleet(trace: Trace, options: SimulateOptions) -> ElasticFleet:
    """Return a fleet that has not begun. Raises ConfigError."""
    size, blocks = options.block_size, options.pool_blocks(trace.ids * trace.block_size)
    fleet = Fleet(
        options.workers, blocks, size, options.cost, options.index_lag_s, options.seed, options.coarse
    )
    if options.quick:
        if trace.closed or not check_quick(trace.requests):
            raise ConfigError("--quick: only for `diurnal` traces")
        return QuickFleet(trace, fleet, options.slo_ttft_s)
    if trace.block_size % size:
        raise ConfigError(f"--block-size: must divide the trace's {trace.block_size}, is {size}")
    policy = "kv_aware" if options.policies == "all" else options.policies
    if policy not in policy_names():
        raise ConfigError(f"--policy: with --autoscale, one of {', '.join(policy_names())}; is {policy!r}")
    ids = BlockIds(trace, size)
    chooser = make_policy(policy, options.seed)
    return ElasticSimulation(trace, ids, _schedule(trace, options), fleet, chooser, options.slo_ttft_s)


def lines(report: ScalingReport) -> list[str]:
    """The report for a person."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.reasons.items())
    text = [
        f"{report.requests} requests in {report.hours:.1f} hours, {report.refused} too large for a pool; "
        f"{report.token_hit_rate:.1%} of their tokens cached",
        f"within {report.ttft_goal_s:g} s: {report.in_goal_share:.2%} "
        f"(TTFT p50 {report.ttft_p50_s:.2f} s, p99 {report.ttft_p99_s:.2f} s)",
        f"worker-hours {report.worker_hours:.1f}, "
        f"with {report.least_workers} to {report.most_workers} workers",
        f"{report.steps} steps ({reasons or 'none'}), {report.direction_changes} changes of direction: "
        f"{report.flaps_per_hour:.2f} an hour",
    ]
    if report.worker_hours_ratio is not None:
        text.append(
            f"clairvoyant minimum {report.clairvoyant_worker_hours:.1f} worker-hours with "
            f"{report.clairvoyant_in_goal_share:.2%} in time; ours over that: {report.worker_hours_ratio:.3f}"
        )
    if report.ideal_worker_hours is not None:
        text.append(
            f"with everything cached that was ever computed: {report.ideal_worker_hours:.1f} worker-hours"
        )
    return text
