"""kvhive simulate: a recorded trace on a fleet that does not exist, under one routing policy or several.

Everything that decides is the real thing (router, policy, index mirror, scheduler, pool); only what computes
and what takes time is not. The same arguments give the same numbers, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvhive.proto.errors import ConfigError
from kvhive.router.policies import make_policy, policy_names
from kvhive.scripts import sim_autoscale, sim_figure
from kvhive.scripts.bench_figure import check_drawable
from kvhive.scripts.no_collector import no_collector
from kvhive.scripts.progress import Progress, show_progress
from kvhive.scripts.sim_limits import Limits, find_limits
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.sim_peers import PeerFacts, make_peer, peer_names
from kvhive.scripts.sim_report import Goal, PolicyReport, report, table
from kvhive.scripts.sim_run import BlockIds, Fleet, Simulation
from kvhive.scripts.trace_arrivals import Pace, Schedule, plan_arrivals
from kvhive.scripts.trace_format import Trace
from kvhive.scripts.trace_source import load_trace

MOST_BLOCKS = 50_000_000
"""Of all pools together: about 0.5 KB each."""

TELL_EVERY = 50
"""Requests between two words on the progress."""


@dataclass(frozen=True, slots=True)
class Study:
    """A trace laid out for a fleet: what all policies have in common."""

    trace: Trace
    ids: BlockIds
    schedule: Schedule
    fleet: Fleet
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the result goes besides the terminal."""

    as_json: bool = False
    png: Path | None = None


def run(source: str, options: SimulateOptions, outputs: Outputs) -> None:
    """Simulate and print. `source`: a file, or a day to be made. Raises KvhiveError, OSError."""
    if options.autoscale:
        sim_autoscale.run(source, options, outputs.as_json)
        return
    if outputs.png is not None:
        check_drawable()
    policies = parse_policies(options.policies)
    goal = Goal(options.slo_ttft_s, options.slo_tpot_s)
    reports: list[PolicyReport] = []
    decision_us: dict[str, float] = {}
    with show_progress(sys.stderr) as tell:
        tell(source, "reading")
        study = lay_out(load_trace(source, options), options)
        tell(source, f"{len(study.trace.requests)} requests")
        for policy in policies:
            numbers, spent = run_policy(study, policy, goal, tell)
            reports.append(numbers)
            decision_us[policy] = spent * 1e6
    if outputs.png is not None:
        sim_figure.draw(outputs.png, reports, _title(study))
    _print(sys.stdout, study, reports, decision_us, outputs.as_json)


def parse_policies(text: str) -> tuple[str, ...]:
    """Return the policies of a comma-separated list; `all` stands for every one. Raises ConfigError."""
    known = (*policy_names(), *peer_names())
    names = known if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"--policy: must be all or of {', '.join(known)}; is {name!r}")
    return tuple(dict.fromkeys(names))


def lay_out(trace: Trace, options: SimulateOptions) -> Study:
    """Fit a trace and a fleet together and find the limits. Raises ConfigError."""
    workers, size, cost = options.workers, options.block_size, options.cost
    if trace.block_size % size:
        raise ConfigError(f"--block-size: must divide the trace's {trace.block_size}, is {size}")
    blocks = options.pool_blocks(trace.ids * trace.block_size)
    if not 1 <= blocks <= MOST_BLOCKS // workers:
        raise ConfigError(f"--capacity-blocks: must be 1 to {MOST_BLOCKS // workers}, is {blocks}")
    pace = Pace(options.rate, options.load)
    schedule = plan_arrivals(trace, pace, workers, cost.prefill_s, options.seed)
    limits = find_limits(trace, schedule, cost, workers, workers * blocks, size)
    fleet = Fleet(workers, blocks, size, cost, options.index_lag_s, options.seed)
    return Study(trace, BlockIds(trace, size), schedule, fleet, limits)


def run_policy(study: Study, policy: str, goal: Goal, tell: Progress) -> tuple[PolicyReport, float]:
    """Simulate one policy; return its numbers, and the CPU seconds that a decision took."""
    facts = PeerFacts()
    peer = policy in peer_names()
    chooser = make_peer(policy, facts) if peer else make_policy(policy, study.fleet.seed)
    total = len(study.trace.requests)

    def say(done: int) -> None:
        if done % TELL_EVERY == 0 or done == total:
            tell(policy, f"simulating {done} of {total}")

    with no_collector():
        simulation = Simulation(
            study.trace, study.ids, study.schedule, study.fleet, chooser, facts if peer else None
        )
        outcome = simulation.run(say)
    numbers = report(policy, outcome, study.limits, goal, study.schedule.load)
    tell(policy, f"done: TTFT mean {numbers.ttft_mean_s:.3f} s, hit rate {numbers.token_hit_rate:.1%}")
    return numbers, outcome.decisions.total_s / max(1, outcome.decisions.count)


def _title(study: Study) -> str:
    fleet, trace = study.fleet, study.trace
    return (
        f"{trace.name}: {len(trace.requests)} requests on {fleet.workers} workers of "
        f"{fleet.capacity_blocks} x {fleet.block_size} tokens, offered load {study.schedule.load:.2f}"
    )


def _print(
    stream: TextIO,
    study: Study,
    reports: Sequence[PolicyReport],
    decision_us: dict[str, float],
    as_json: bool,
) -> None:
    if as_json:
        # What deciding cost differs from run to run: it is in the table alone.
        print(json.dumps([each.to_json() for each in reports], indent=2), file=stream)
        return
    print(_title(study), file=stream)
    print("\n".join(table(reports, decision_us)), file=stream)
