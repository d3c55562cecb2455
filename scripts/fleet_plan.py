"""What is to be done about a fleet: pure, (what there is, how many are wanted) -> (create, drain, end).

Workers that are not up yet go before any that serves: a wave of starts that came too late must not cost a
warm cache. Of those that serve, the one whose cache is worth least goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal["pending", "starting", "warming", "serving", "draining", "failed", "dead"]
"""Where a worker is: without a place in Ray yet, loading, ..., or with an actor that has ended."""

_GOING_FIRST: tuple[Stage, ...] = ("pending", "starting", "warming", "serving")


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as it was seen."""

    worker_id: str
    stage: Stage
    value: float = 0.0
    """Seconds of prefill that its cache is expected to save."""
    leaving_node: bool = False
    """Its machine is about to be taken away."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is to be done now."""

    create: int = 0
    drain: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    """To be ended without ceremony: nobody is served there."""


def plan(workers: Sequence[Seen], wanted: int) -> FleetPlan:
    """Say what brings a fleet to `wanted` workers that serve, or soon will."""
    over = [w.worker_id for w in workers if w.stage in ("failed", "dead")]
    leaving = [w for w in workers if w.leaving_node and w.stage in _GOING_FIRST]
    staying = [w for w in workers if w.stage in _GOING_FIRST and not w.leaving_node]
    surplus = sorted(staying, key=_first_to_go)[: max(0, len(staying) - wanted)]
    go = [*leaving, *surplus]
    return FleetPlan(
        create=max(0, wanted - len(staying)),
        drain=tuple(w.worker_id for w in go if w.stage == "serving"),
        end=(*over, *(w.worker_id for w in go if w.stage != "serving")),
    )


def _first_to_go(worker: Seen) -> tuple[int, float, int, str]:
    """Of equals the youngest goes: ids are numbered."""
    number = int(worker.worker_id.lstrip("w")) if worker.worker_id.lstrip("w").isdigit() else 0
    return _GOING_FIRST.index(worker.stage), worker.value, -number, worker.worker_id
