"""A simulated fleet whose size follows the autoscaling policy, and what that costs and gives.

The policy, and what makes its snapshots of the workers' reports, are the real ones; they are asked every
`autoscaling.interval_s` of virtual time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.router.autoscaling_policy import AutoscalingState, Reason, decide
from kvhive.router.autoscaling_signals import FleetSignals, RouterCounts
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.sim_report import quantile
from kvhive.scripts.sim_run import Served


class ElasticFleet(Protocol):
    """What a fleet can be asked whose workers come and go."""

    now: float
    goal_s: float

    @property
    def served(self) -> list[Served]:
        """All requests that have arrived, in order."""
        ...

    def begin(self) -> None:
        """Lay out the arrivals."""
        ...

    def advance(self, until: float, tell: Callable[[int], None] = ...) -> bool:
        """Play on to a moment; return whether anything happens after it."""
        ...

    def promote(self) -> None:
        """Let those serve that are ready by now, and send them what was held."""
        ...

    def resize(self, count: int, startup_s: float) -> None:
        """Ask for so many workers, starting and serving ones together."""
        ...

    def views(self) -> list[WorkerView]:
        """What a controller sees of the workers."""
        ...

    def asked_for(self) -> dict[str, float]:
        """Workers that do not serve yet, and since when they are asked for."""
        ...

    def router_counts(self) -> RouterCounts:
        """What the router tells a controller."""
        ...

    def paid_s(self) -> float:
        """Seconds that all workers together were paid for until now."""
        ...


@dataclass(slots=True)
class Scaling:
    """What the policy decided."""

    targets: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many) of the beginning and of each change."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of the steps."""

    def direction_changes(self) -> int:
        """How often a step went the other way than the one before it."""
        counts = [count for _, count in self.targets]
        ups = [after > before for before, after in itertools.pairwise(counts)]
        return sum(one is not other for one, other in itertools.pairwise(ups))


def scale(
    simulation: ElasticFleet,
    config: AutoscalingConfig,
    startup_s: float,
    tell: Callable[[int], None] = lambda done: None,
) -> Scaling:
    """Play a simulation to its end with as many workers as the policy wants."""
    signals, state = FleetSignals(), AutoscalingState()
    scaling = Scaling()
    simulation.begin()
    more, tick = True, 0
    while more:
        more = simulation.advance(tick * config.interval_s, tell)
        tick += 1
        simulation.promote()
        now = simulation.now
        signals.hear_routers({"router": simulation.router_counts()}, now)
        snapshot = signals.snapshot(simulation.views(), now, simulation.asked_for())
        decision = decide(config, snapshot, state, now)
        before = None if state.target is None else scaling.targets[-1][1]
        state = decision.state
        if decision.target != before:
            scaling.targets.append((now, decision.target))
            if before is not None:
                scaling.reasons[decision.reason] += 1
            simulation.resize(decision.target, startup_s)
    return scaling


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """What `kvhive simulate --autoscale` says."""

    requests: int
    refused: int
    """Too large for any pool; in no other number."""
    hours: float
    """From the first arrival until the last answer."""
    ttft_goal_s: float
    in_goal_share: float
    """Requests whose first token came within the goal, of all."""
    ttft_p50_s: float
    ttft_p99_s: float
    token_hit_rate: float
    worker_hours: float
    """Paid: from when a worker is asked for, its start and its drain included."""
    least_workers: int
    most_workers: int
    steps: int
    """Changes of the target."""
    direction_changes: int
    flaps_per_hour: float
    """Direction changes an hour."""
    reasons: dict[str, int]
    """Of the steps."""
    clairvoyant_worker_hours: float | None = None
    """The fewest that would have done, with what was cached here."""
    clairvoyant_in_goal_share: float | None = None
    ideal_worker_hours: float | None = None
    """... with everything cached that ever was in an earlier prompt."""
    worker_hours_ratio: float | None = None
    """Ours over the clairvoyant minimum."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            name: round(value, 9) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def in_goal(served: Served, goal_s: float) -> bool:
    """Whether a request's first token came within the goal."""
    return 0 <= served.first_token_at - served.arrived_at <= goal_s


def scaling_report(simulation: ElasticFleet, scaling: Scaling) -> ScalingReport:
    """Sum up a simulation that has ended."""
    done = [served for served in simulation.served if not served.refused]
    ttft = [served.first_token_at - served.arrived_at for served in done]
    hours = simulation.now / 3600
    counts = [count for _, count in scaling.targets]
    changes = scaling.direction_changes()
    return ScalingReport(
        requests=len(simulation.served),
        refused=len(simulation.served) - len(done),
        hours=hours,
        ttft_goal_s=simulation.goal_s,
        in_goal_share=sum(in_goal(served, simulation.goal_s) for served in done) / max(1, len(done)),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        token_hit_rate=sum(served.cached_tokens for served in done)
        / max(1, sum(served.prompt_tokens for served in done)),
        worker_hours=simulation.paid_s() / 3600,
        least_workers=min(counts),
        most_workers=max(counts),
        steps=len(counts) - 1,
        direction_changes=changes,
        flaps_per_hour=changes / hours if hours else 0.0,
        reasons={Reason(reason).value: count for reason, count in sorted(scaling.reasons.items())},
    )
