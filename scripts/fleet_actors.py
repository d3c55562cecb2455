"""The actors of one cluster's workers: made, asked how far they are without waiting for any, and ended.

Which there are is Ray's to say, so a controller that starts again finds the workers of the one before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray._private.state import state as ray_state

from kvhive.scripts.worker_fleet import Fleet
from kvhive.worker.actor import (
    ActorStatus,
    Placement,
    create_worker,
    find_worker,
    give_place_back,
    list_workers,
)

log = logging.getLogger(__name__)

SILENT_AFTER_S = 10.0
"""An actor whose answer takes longer is said to be silent: `status` answers at once, even while loading."""
HUNG_AFTER_S = 120.0
"""... and to hang: without a lease, too, it is replaced."""
_LOOK_S = 0.2
_FIRST_LOOK_S = 3.0
"""For workers that were found: until one has answered nobody knows whether it has a place."""
_KILLED_S = 30.0
"""So long Ray may still list an actor that it was told to kill; after that it was not killed."""
_STOP_EXTRA_S = 5.0


@dataclass(frozen=True, slots=True)
class ActorView:
    """What an actor says of itself, or what is known without its word."""

    phase: str
    """`pending` (Ray has no place for it yet), the phases of ActorStatus, `restarting`, `hung`, `dead`."""
    detail: str
    node: str = ""
    """The Ray node that it is on."""


@dataclass(slots=True)
class _Known:
    handle: Any
    view: ActorView
    question: Any = None
    asked_at: float = 0.0


class FleetActors:
    """Every method takes well under a second but the first `poll`, and `end`, which waits for streams.

    `end` may be called from any thread, whatever runs in others: what they share changes in single steps.
    """

    def __init__(
        self, fleet: Fleet, environment: dict[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._cluster = fleet.config.cluster
        workers = fleet.config.workers
        gpus = workers.num_gpus if workers.num_gpus >= 0 else float(fleet.device == "cuda")
        self._placement = Placement(workers.num_cpus, gpus, environment)
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._ending: set[str] = set()
        self._killed: dict[str, float] = {}

    def create(self, worker_id: str, warm_s: float) -> None:
        """Create an actor; Ray places it when it has room. Raises ValueError when there is one."""
        options = replace(self._fleet.options(worker_id), warm_s=warm_s)
        handle = create_worker(options, self._placement)
        self._known[worker_id] = _Known(handle, ActorView("pending", "waiting for a place in Ray"))

    def poll(self) -> dict[str, ActorView]:
        """Return what is known of each actor now."""
        now = self._clock()
        found = self._find(now)
        for known in list(self._known.values()):
            if known.question is None and known.view.phase != "dead":
                known.question, known.asked_at = known.handle.status.remote(), now
        asked = [known for known in list(self._known.values()) if known.question is not None]
        questions = [known.question for known in asked]
        look_s = _FIRST_LOOK_S if found else _LOOK_S
        answered = set(
            ray.wait(questions, num_returns=len(questions), timeout=look_s)[0] if questions else ()
        )
        for known in asked:
            if known.question in answered:
                known.view, known.question = _heard(known.question), None
            elif known.view.phase in ("starting", "serving") and now - known.asked_at > SILENT_AFTER_S:
                hung = now - known.asked_at > HUNG_AFTER_S
                known.view = replace(
                    known.view, phase="hung" if hung else known.view.phase, detail="does not answer"
                )
        return {worker_id: known.view for worker_id, known in list(self._known.items())}

    def end(self, worker_id: str, grace_s: float) -> None:
        """Let a worker give its streams `grace_s` seconds and deregister, then end its actor for good."""
        if worker_id not in self._known:
            return
        self._ending.add(worker_id)
        try:
            known = self._known.pop(worker_id, None)
            if known is None:
                return
            if known.view.phase in ("starting", "serving"):
                ray.wait([known.handle.stop.remote(grace_s)], timeout=grace_s + _STOP_EXTRA_S)
            ray.kill(known.handle, no_restart=True)
            self._killed[worker_id] = self._clock()
            give_place_back(self._cluster, worker_id)
        finally:
            self._ending.discard(worker_id)

    def _find(self, now: float) -> bool:
        """Take in the actors that Ray has and we do not know; those that are being ended are none of them."""
        listed = list_workers(self._cluster)
        for worker_id, at in list(self._killed.items()):
            if now - at > _KILLED_S:
                self._killed.pop(worker_id, None)
        found = False
        for worker_id in listed:
            # In the order that `end` takes them from one to the next, so that none slips through.
            if worker_id in self._known or worker_id in self._ending or worker_id in self._killed:
                continue
            handle = find_worker(self._cluster, worker_id)
            if handle is not None:
                self._known[worker_id] = _Known(handle, ActorView("pending", "waiting for a place in Ray"))
                found = True
        return found


def draining_nodes() -> set[str]:
    """Return the nodes that Ray was told will go (`ray drain-node`, a cloud's notice of pre-emption)."""
    return set(ray_state.get_draining_nodes())  # Ray has no public call for it


def _heard(question: Any) -> ActorView:
    try:
        answer: ActorStatus = ray.get(question)
        return ActorView(answer["phase"], answer["detail"], answer["node"])
    except ray.exceptions.ActorDiedError as error:
        return ActorView("dead", str(error).strip().splitlines()[-1])
    except ray.exceptions.ActorUnavailableError:
        return ActorView("restarting", "Ray is starting it again")
    except ray.exceptions.RayError as error:
        return ActorView("restarting", str(error).strip().splitlines()[-1])
