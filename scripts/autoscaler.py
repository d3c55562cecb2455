"""The autoscaling policy at work: what the controller sees becomes a snapshot, a decision, and a wish.

All that it remembers is a forecast and what was asked for lately: a controller that starts again begins at
what was wanted last, and the policy goes below that no sooner than it would otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.proto.index_schema import WorkerState
from kvhive.router.autoscaling_policy import AutoscalingState, ScalingDecision, decide
from kvhive.router.autoscaling_signals import FleetSignals, RouterCounts
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.fleet_plan import Stage

_STATES: Mapping[Stage, WorkerState] = {
    "pending": WorkerState.STARTING,
    "starting": WorkerState.STARTING,
    "warming": WorkerState.STARTING,
    "serving": WorkerState.SERVING,
}
"""To the policy a worker will serve, serves, or goes."""


class Autoscaler:
    """Decides every `interval_s`, and in between says what it said before."""

    def __init__(
        self, config: AutoscalingConfig, wanted: int, routers: Callable[[], Mapping[str, RouterCounts]]
    ) -> None:
        """Begin at `wanted` workers; `routers` says what routers count, without waiting for any."""
        self._config = config
        self._routers = routers
        self._signals = FleetSignals()
        self._state = AutoscalingState(target=wanted)
        self._asked_for: dict[str, float] = {}
        self._decision: ScalingDecision | None = None
        self._decided_at = 0.0

    def decide(self, views: list[WorkerView], stages: Mapping[str, Stage], now: float) -> ScalingDecision:
        """Return how many workers there should be, starting and serving ones together, and why."""
        if self._decision is not None and now - self._decided_at < self._config.interval_s:
            return self._decision
        coming = [
            worker_id for worker_id, stage in stages.items() if _STATES.get(stage) is WorkerState.STARTING
        ]
        self._asked_for = {worker_id: self._asked_for.get(worker_id, now) for worker_id in coming}
        self._signals.hear_routers(self._routers(), now)
        snapshot = self._signals.snapshot(_as_planned(views, stages), now, self._asked_for)
        decision = self._decision = decide(self._config, snapshot, self._state, now)
        self._state, self._decided_at = decision.state, now
        return decision


def _as_planned(views: list[WorkerView], stages: Mapping[str, Stage]) -> list[WorkerView]:
    """Return the views with the states that the controller knows of, which the index hears of later."""
    return [
        replace(view, record=replace(view.record, state=_STATES.get(stage, WorkerState.DRAINING)))
        for view in views
        if (stage := stages.get(view.record.worker_id)) is not None
    ]
