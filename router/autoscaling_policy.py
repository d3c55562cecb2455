"""How many workers there should be: a pure function of what is known, what was decided before, and the time.

    decide(config, snapshot, state, now) -> decision: the target, why, and the next state

A step up comes as soon as more workers are asked for, after a cool-down; a step down only when fewer have
been enough for `down_after_s`. Both are bounded. The state keeps a clock of its own, which only goes
forward, never far at once: what a host's clock does, or a controller that was away, changes a decision by
seconds. A fresh state begins at the workers there are, and may not go below them before it has watched that
long itself.

Several pools (of models, of roles) are decided about one by one, each with its own snapshot and state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.router.autoscaling_demand import Demand, demand_of
from kvhive.router.autoscaling_forecast import Forecast
from kvhive.router.autoscaling_snapshot import FleetSnapshot

LONGEST_GAP_S = 60.0
"""Whatever the clock says, no more time has passed between two decisions."""

WINDOW_PARTS = 30
"""The most workers asked for within `down_after_s` are remembered in so many parts of it."""

LEAST_HEADROOM, MOST_HEADROOM = 0.25, 4.0
"""Times what the formulas of autoscaling_demand.py say."""

HEADROOM_S = 3600.0
"""Where nobody was late for this long the headroom is 1 less; where twice as many as may be, 1 more."""

MOST_LATE = 10.0
"""Times as many as may be: one bad minute is not to be worse than that."""


class Reason(StrEnum):
    """Why the target is what it is."""

    STEADY = "steady"
    """It is what is asked for, or not different enough."""
    PREFILL = "prefill"
    BACKLOG = "backlog"
    SLOTS = "slots"
    POOL = "pool"
    """More: the signal of that name asks for it (autoscaling_demand.py)."""
    HELD = "held"
    """From zero: somebody is waiting for a first worker."""
    LESS = "less"
    """Fewer have been enough for long."""
    IDLE = "idle"
    """To zero: nobody has asked for anything for long."""
    COOLING = "cooling"
    """More are asked for, but the last step is too recent."""
    WATCHING = "watching"
    """Fewer are asked for, but not for long enough."""
    BOUNDS = "bounds"
    """It was beyond `min_workers` or `max_workers`, or more is asked for than those allow."""
    BLIND = "blind"
    """The snapshot says nothing that a decision may rest on: what was decided stays."""


@dataclass(frozen=True, slots=True)
class AutoscalingState:
    """What one decision leaves to the next. The default is that of a controller that has just begun."""

    target: int | None = None
    as_of: float | None = None
    """The `now` of the last decision."""
    clock_s: float = 0.0
    """The time that has passed between decisions, each gap bounded; what follows is on this clock."""
    up_at_s: float = -math.inf
    down_at_s: float = -math.inf
    asked: tuple[tuple[int, int], ...] = ()
    """(part of the window, most workers asked for in it), oldest first."""
    forecast: Forecast = Forecast()  # noqa: RUF009 - frozen
    headroom: float = 1.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many workers there should be, starting and serving ones together, and why."""

    target: int
    reason: Reason
    state: AutoscalingState
    demand: Demand = Demand()  # noqa: RUF009 - frozen
    """What each signal asks for: for people, not for machines."""


def decide(
    config: AutoscalingConfig, snapshot: FleetSnapshot, state: AutoscalingState, now: float
) -> ScalingDecision:
    """Decide about one pool. Never raises; the target is always within the configured bounds."""
    state, elapsed_s = _advanced(config, snapshot, state, now)
    before = state.target or 0
    if not snapshot.sound():
        return ScalingDecision(before, Reason.BLIND, state)
    state = _learn(config, snapshot, state, elapsed_s)
    demand = demand_of(config, snapshot, state.forecast, state.headroom)
    asked = _asked(config, snapshot, demand, before)
    state = replace(state, asked=_remember(config, state, asked))
    if before == 0 and asked > 0:
        reason = Reason.HELD if snapshot.held else Reason.PREFILL
        return _step(config, state, demand, asked, reason)
    if before > 0 and asked == 0:
        return _step(config, state, demand, 0, Reason.IDLE)
    if asked > before:
        return _up(config, state, demand, asked)
    if asked < before:
        return _down(config, state, demand)
    capped = demand.workers() > config.max_workers
    return ScalingDecision(before, Reason.BOUNDS if capped else Reason.STEADY, state, demand)


def _advanced(
    config: AutoscalingConfig, snapshot: FleetSnapshot, state: AutoscalingState, now: float
) -> tuple[AutoscalingState, float]:
    """Move the state's clock on; give a fresh state its target. Return the time that has passed, too."""
    elapsed_s = 0.0
    if state.as_of is not None and math.isfinite(now):
        elapsed_s = min(max(0.0, now - state.as_of), LONGEST_GAP_S)
    target = snapshot.present() if state.target is None else state.target
    return replace(
        state,
        target=min(max(target, config.min_workers), config.max_workers),
        as_of=now if math.isfinite(now) else state.as_of,
        clock_s=state.clock_s + elapsed_s,
    ), elapsed_s


def _learn(
    config: AutoscalingConfig, snapshot: FleetSnapshot, state: AutoscalingState, elapsed_s: float
) -> AutoscalingState:
    """Take in what arrived, and how many were late."""
    forecast, headroom = state.forecast, state.headroom
    if elapsed_s > 0:
        forecast = forecast.watch(snapshot.work_s_per_s, elapsed_s)
    if snapshot.ttft_share is not None:
        late = min((1 - snapshot.ttft_share) / (1 - config.ttft_goal_share), MOST_LATE)
        headroom += (late - 1) * elapsed_s / HEADROOM_S
        headroom = min(max(headroom, LEAST_HEADROOM), MOST_HEADROOM)
    return replace(state, forecast=forecast, headroom=headroom)


def _asked(config: AutoscalingConfig, snapshot: FleetSnapshot, demand: Demand, before: int) -> int:
    """Workers asked for, within the bounds. Only long silence asks for none, only work for a first one."""
    busy = snapshot.held > 0 or any(worker.running or worker.queued_s for worker in snapshot.serving())
    idle = not busy and (before == 0 or snapshot.idle_s >= config.idle_s)
    least = 0 if idle else 1
    if idle and config.min_workers == 0:
        return 0
    return min(max(demand.workers(), least, config.min_workers), config.max_workers)


def _remember(config: AutoscalingConfig, state: AutoscalingState, asked: int) -> tuple[tuple[int, int], ...]:
    part_s = max(config.down_after_s, 1.0) / WINDOW_PARTS
    part = int(state.clock_s / part_s)
    kept = [entry for entry in state.asked if part - WINDOW_PARTS <= entry[0] <= part]
    if kept and kept[-1][0] == part:
        kept[-1] = part, max(kept[-1][1], asked)
    else:
        kept.append((part, asked))
    return tuple(kept)


def _up(config: AutoscalingConfig, state: AutoscalingState, demand: Demand, asked: int) -> ScalingDecision:
    before = state.target or 0
    if state.clock_s - state.up_at_s < config.up_cooldown_s:
        return ScalingDecision(before, Reason.COOLING, state, demand)
    most = before + max(1, int(config.max_step_up * before))
    return _step(config, state, demand, min(asked, most), _strongest(demand))


def _down(config: AutoscalingConfig, state: AutoscalingState, demand: Demand) -> ScalingDecision:
    """Go down to the most that was asked for within the window, if it was watched from end to end."""
    before = state.target or 0
    enough = max(count for _, count in state.asked)
    rested = (
        state.clock_s >= config.down_after_s
        and state.clock_s - state.up_at_s >= config.down_after_s
        and state.clock_s - state.down_at_s >= config.down_cooldown_s
    )
    if enough >= before or before - enough < config.down_hysteresis * before or not rested:
        return ScalingDecision(before, Reason.WATCHING, state, demand)
    step = min(before - enough, max(1, int(config.max_step_down * before)))
    return _step(config, state, demand, before - step, Reason.LESS)


def _step(
    config: AutoscalingConfig, state: AutoscalingState, demand: Demand, target: int, reason: Reason
) -> ScalingDecision:
    before, clock_s = state.target or 0, state.clock_s
    up_at_s = clock_s if target > before else state.up_at_s
    down_at_s = clock_s if target < before else state.down_at_s
    state = replace(state, target=target, up_at_s=up_at_s, down_at_s=down_at_s)
    return ScalingDecision(target, reason, state, demand)


def _strongest(demand: Demand) -> Reason:
    """The signal that asks for most."""
    if demand.prefill + demand.backlog >= max(demand.slots, demand.pool):
        return Reason.PREFILL if demand.prefill >= demand.backlog else Reason.BACKLOG
    return Reason.SLOTS if demand.slots >= demand.pool else Reason.POOL
