"""Makes snapshots for the autoscaling policy of what workers and routers say of themselves.

Work that arrives is counted where it arrives: in a worker's report, as the tokens it had to compute for the
requests it admitted (hits are off already), and as what its queue has grown by, in seconds by its own model
of its speed. Counters only grow while a process lives, so what several controllers or a new one read is the
same; a smaller count is that of a new process and begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvhive.proto.index_schema import LoadReport, WorkerState
from kvhive.router.autoscaling_snapshot import FleetSnapshot, WorkerSnapshot
from kvhive.router.worker_registry import WorkerView

RECENT_S = 300.0
"""Half-life of what counts as recent: shares of requests in time, mean prefill of a request, misses."""

LEAST_WORK_S = 1e-6
"""Less is rounding: nobody has asked for anything."""

LEAST_REQUESTS = 0.5
"""Fewer of late have no share in time: one speaks for RECENT_S, many for as long as that many are news."""

STARTUP_WEIGHT = 0.3
"""Of the latest start-up in the mean of them."""


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What a router counts since its process began, but for `held`."""

    first_tokens: int = 0
    first_tokens_in_goal: int = 0
    """Requests refused or timed out for want of workers are in the first number alone."""
    held: int = 0
    """Requests it holds now because there is no worker."""


@dataclass(slots=True)
class _Recent:
    """Two sums that halve every RECENT_S seconds, and their quotient."""

    part: float = 0.0
    whole: float = 0.0
    as_of: float = -math.inf

    def add(self, part: float, whole: float, now: float) -> None:
        fade = math.pow(0.5, max(0.0, now - self.as_of) / RECENT_S)
        self.part, self.whole = self.part * fade + part, self.whole * fade + whole
        self.as_of = max(now, self.as_of)

    def share(self) -> float | None:
        return self.part / self.whole if self.whole > 1e-9 else None

    def share_of_late(self, now: float) -> float | None:
        """None when less than LEAST_REQUESTS is left of what was counted: silence says nothing."""
        fade = math.pow(0.5, max(0.0, now - self.as_of) / RECENT_S)
        return self.share() if self.whole * fade >= LEAST_REQUESTS else None


@dataclass(slots=True)
class _Heard:
    epoch: int
    load: LoadReport
    waiting_s: float
    """What the prompts that wait were taken to be worth."""


@dataclass(slots=True)
class FleetSignals:
    """What one controller has heard of one pool. Bounded by the workers and routers there are."""

    _workers: dict[str, _Heard] = field(default_factory=dict)
    _before: dict[str, _Heard] = field(default_factory=dict)
    """As of the snapshot before."""
    _routers: dict[str, RouterCounts] = field(default_factory=dict)
    _in_time: _Recent = field(default_factory=_Recent)
    _missed: _Recent = field(default_factory=_Recent)
    _request: _Recent = field(default_factory=_Recent)
    _new: dict[str, float] = field(default_factory=dict)
    """Workers that do not serve yet -> when they were asked for."""
    _startup_s: float = 0.0
    _owed_s: float = 0.0
    """Work that was counted while it waited, and turned out to be less."""
    _seen_at: float | None = None
    _asked_at: float | None = None

    def hear_routers(self, counts: Mapping[str, RouterCounts], now: float) -> None:
        """Take in what all routers count, by name. One that is missing has gone, and is forgotten."""
        for name, new in counts.items():
            old = self._routers.get(name)
            if old is None or new.first_tokens < old.first_tokens:
                old = RouterCounts() if old else new  # the first word of a router is about times unknown
            asked = new.first_tokens - old.first_tokens
            if asked > 0:
                in_goal = max(0, new.first_tokens_in_goal - old.first_tokens_in_goal)
                self._in_time.add(min(in_goal, asked), asked, now)
            if asked > 0 or new.held:
                self._asked_at = now
        self._routers = dict(counts)

    def snapshot(
        self, views: Sequence[WorkerView], now: float, asked_for: Mapping[str, float] | None = None
    ) -> FleetSnapshot:
        """Return the pool as it is now.

        `views`: the latest of every registered worker. `asked_for`: of workers that were asked for and do not
        serve yet, registered or not, when that was.
        """
        since = math.inf if self._seen_at is None else max(0.0, now - self._seen_at)
        work_s = self._arrived(views, now) if since > 0 else 0.0
        self._seen_at = now
        self._watch_starts(views, asked_for or {}, now)
        if self._asked_at is None or work_s > LEAST_WORK_S or any(_busy(view.record.load) for view in views):
            self._asked_at = now
        workers = [self._worker(view) for view in views if view.record.state is not WorkerState.STOPPED]
        workers += self._pending(views)
        return FleetSnapshot(
            workers=workers,
            work_s_per_s=work_s / since if since > 0 else 0.0,
            request_s=self._request.share() or 0.0,
            ttft_share=self._in_time.share_of_late(now),
            startup_s=self._startup_s,
            held=sum(counts.held for counts in self._routers.values()),
            idle_s=max(0.0, now - self._asked_at),
        )

    def _arrived(self, views: Sequence[WorkerView], now: float) -> float:
        """Seconds of prefill that came since the last snapshot."""
        work_s = self._owed_s
        heard = {}
        for view in views:
            record, load = view.record, view.record.load
            last = self._workers.get(record.worker_id)
            if last is None:  # what it did before we came is no news
                last = _Heard(record.epoch, load, self._waiting_s(load))
            elif load.prefix_queries < last.load.prefix_queries:  # not by its epoch: Redis' end is none of it
                last = _Heard(record.epoch, LoadReport(), 0.0)
            work_s += self._admitted(last.load, load, now)
            heard[record.worker_id] = _Heard(record.epoch, load, self._waiting_s(load))
            work_s += heard[record.worker_id].waiting_s - last.waiting_s
        self._before, self._workers = self._workers, heard
        self._owed_s = min(0.0, work_s)
        return max(0.0, work_s)

    def _admitted(self, old: LoadReport, new: LoadReport, now: float) -> float:
        """Seconds of prefill of the requests that a worker admitted between two reports."""
        asked, hits = new.prefix_queries - old.prefix_queries, new.prefix_hits - old.prefix_hits
        if asked <= 0:
            return 0.0
        computed = max(0, asked - hits - (new.pulled_tokens - old.pulled_tokens))
        pairs = max(0, new.prefill_pairs - old.prefill_pairs)
        work_s = computed * _per_token_s(new) + pairs * new.step_per_attention_s
        self._missed.add(work_s, asked, now)
        self._request.add(work_s, new.admitted - old.admitted, now)
        return work_s

    def _waiting_s(self, load: LoadReport) -> float:
        """What waiting prompts are worth: as much a token as those that were admitted lately."""
        share = self._missed.share()
        return load.waiting_tokens * (_per_token_s(load) if share is None else share)

    def _watch_starts(self, views: Sequence[WorkerView], asked_for: Mapping[str, float], now: float) -> None:
        """Learn how long workers take to start; one that vanished before it served has taught nothing."""
        serving = {view.record.worker_id for view in views if view.record.state is WorkerState.SERVING}
        for worker_id in serving & self._new.keys():
            took_s = max(0.0, now - self._new[worker_id])
            weight = STARTUP_WEIGHT if self._startup_s else 1.0
            self._startup_s += (took_s - self._startup_s) * weight
        self._new = {worker_id: at for worker_id, at in asked_for.items() if worker_id not in serving}

    def _worker(self, view: WorkerView) -> WorkerSnapshot:
        record, load = view.record, view.record.load
        last = self._before.get(record.worker_id)
        old = last.load if last is not None and last.epoch == record.epoch else load
        preempted = load.preemptions > old.preemptions
        live = load.blocks_live / load.blocks_total if load.blocks_total else 0.0
        since = self._new.get(record.worker_id)
        return WorkerSnapshot(
            worker_id=record.worker_id,
            state=record.state,
            ready_at=None if since is None else since + self._startup_s,
            queued_s=load.queued_prefill_tokens * _per_token_s(load),
            running=load.running,
            most_running=load.max_running,
            live_share=1.0 if preempted else live,
            victim_reuse=load.victim_reuse,
        )

    def _pending(self, views: Sequence[WorkerView]) -> list[WorkerSnapshot]:
        """Workers that were asked for and have not registered."""
        known = {view.record.worker_id for view in views}
        return [
            WorkerSnapshot(worker_id, WorkerState.STARTING, since + self._startup_s)
            for worker_id, since in self._new.items()
            if worker_id not in known
        ]


def _per_token_s(load: LoadReport) -> float:
    """Seconds of a prompt's token in full steps, in the company of what decodes."""
    decoding = load.running * load.step_per_token_s
    return load.step_per_token_s + (load.step_base_s + decoding) / load.max_step_tokens


def _busy(load: LoadReport) -> bool:
    return load.running > 0 or load.waiting > 0
