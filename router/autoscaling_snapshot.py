"""What an autoscaling decision is made of: one pool of equal workers at one moment, in seconds and shares.

A snapshot is plain values. Who makes it of the workers' own reports is autoscaling_signals.py; who decides
is autoscaling_policy.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvhive.proto.index_schema import WorkerState


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker. What it does not say is 0: a worker that has yet to start says nothing."""

    worker_id: str
    state: WorkerState
    ready_at: float | None = None
    """A starting one: when it is expected to serve, on the clock of `now`; None while nobody can tell."""
    queued_s: float = 0.0
    """Seconds of prefill ahead of a newcomer: the predicted TTFT of a prompt of which all is cached."""
    running: int = 0
    most_running: int = 0
    """Slots; 0: unknown."""
    live_share: float = 0.0
    """Of its pool, what running requests use; 1 where some of it was taken from a request that ran."""
    victim_reuse: float = 0.0
    """How likely a block that is evicted would have been hit."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """One pool's workers and what is asked of them. An empty one says that nothing is known."""

    workers: Sequence[WorkerSnapshot] = ()
    work_s_per_s: float = 0.0
    """Seconds of prefill that arrive in a second, as the workers measure themselves, hits taken off."""
    request_s: float = 0.0
    """Seconds of prefill of one request, the mean of late; 0: unknown."""
    ttft_share: float | None = None
    """Share of the recent requests whose first token came within the goal; None: there were none."""
    startup_s: float = 0.0
    """How long workers took lately until they served; 0: none was seen to."""
    held: int = 0
    """Requests held because there is no worker."""
    idle_s: float = 0.0
    """Since anybody last asked for anything."""

    def present(self) -> int:
        """Workers that serve or will: those that count towards a target."""
        return self.count(WorkerState.STARTING) + self.count(WorkerState.SERVING)

    def count(self, state: WorkerState) -> int:
        """Workers in a state."""
        return sum(worker.state is state for worker in self.workers)

    def serving(self) -> list[WorkerSnapshot]:
        """The workers that get requests."""
        return [worker for worker in self.workers if worker.state is WorkerState.SERVING]

    def sound(self) -> bool:
        """Whether every number is one that a decision may rest on."""
        fleet = (
            self.work_s_per_s,
            self.request_s,
            self.startup_s,
            self.held,
            self.idle_s,
            self.ttft_share or 0.0,
        )
        each = (
            number
            for worker in self.workers
            for number in (worker.queued_s, worker.running, worker.live_share, worker.victim_reuse)
        )
        return all(math.isfinite(number) and number >= 0 for number in (*fleet, *each))
