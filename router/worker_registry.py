"""Who is in the cluster: polls the workers' leases and records, and says who may get a request.

A lease is judged on Redis' clock, and by what this process sees of it: a lease that nobody renews for as long
as it lasts is over, however long Redis, whose clock may have been set back, will keep the record. While Redis
is away, or takes no writes, nobody is judged at all; and a worker whose record vanishes before its lease
could have ended has not died, Redis has lost data: it keeps its place for one lease, in which it will
register again.

How long nobody has renewed a lease counts up to when Redis was asked, not to when its answer was read: this
process may have been frozen in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvhive.proto.index_schema import IndexKeys, WorkerRecord, WorkerState
from kvhive.proto.retry import backoff_s, raise_if_cancelled
from kvhive.router.worker_health import WorkerHealth

log = logging.getLogger(__name__)

MAX_WORKERS = 4096
"""Most workers read from the index; those with the latest leases beyond it are not seen."""

_RENEWED_MS = 20.0
"""An expiry that has moved by less was read at another moment of the same millisecond clock, not renewed."""

_LEASES = """
return {redis.call('TIME'), redis.call('ZRANGE', KEYS[1], 0, ARGV[1], 'WITHSCORES')}
"""
"""The clock by which the deadlines were written, which in a Redis Cluster is that of their node."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a worker must have in common with this router, or their block hashes never meet."""

    model_identity: str
    """Hex digest, as in WorkerRecord."""
    block_size: int

    def mismatch(self, record: WorkerRecord) -> str:
        """Name the field that differs and both values; empty when all agree."""
        for name in ("block_size", "model_identity"):
            ours, theirs = getattr(self, name), getattr(record, name)
            if ours != theirs:
                return f"{name}: the router has {ours}, the worker has {theirs}"
        return ""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker as of the last poll."""

    record: WorkerRecord
    reported_at: float
    """When the worker made its load report, on this process' monotonic clock."""


@dataclass(frozen=True, slots=True)
class RawWorker:
    """What Redis has of one worker id."""

    fields: dict[bytes, bytes]
    deadline_ms: float
    """Score in `workers`; 0 when it is not a member."""
    expires_in_ms: int
    """PTTL of the record: negative when it is gone or has no expiry."""

    def left_ms(self, now_ms: float) -> float:
        """How long its lease still lasts."""
        return max(self.expires_in_ms, self.deadline_ms - now_ms)


@dataclass(slots=True)
class _Member:
    view: WorkerView
    lease_until: float
    """Local time before which the record cannot have expired."""
    keep_until: float | None = None
    """Set while the record is missing: the worker leaves then, unless it comes back."""
    expiry_ms: float = 0.0
    """When the lease ends, on Redis' clock: the same in every poll until it is renewed."""
    renewed_at: float = 0.0
    """Local time of the poll that first saw it."""


@dataclass(slots=True)
class RegistryCounters:
    """What happened since the registry was made."""

    refused: int = 0
    """Registrations (worker and epoch) of another model or block size."""
    malformed: int = 0
    failed_polls: int = 0
    leases_ended: int = 0


@dataclass(slots=True)
class WorkerRegistry:
    """Follows the workers of one cluster. For the event loop's thread; times are monotonic seconds.

    `on_join` is called with the record of a new worker and of a known one's new epoch, `on_leave` with the
    id of one that is gone; both from within `poll`, so they must be quick and must not raise.
    """

    redis: Redis
    keys: IndexKeys
    spec: ModelSpec
    lease_s: float
    cooldown_s: float
    poll_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    on_join: list[Callable[[WorkerRecord], None]] = field(default_factory=list)
    on_leave: list[Callable[[str], None]] = field(default_factory=list)
    counters: RegistryCounters = field(default_factory=RegistryCounters)
    _members: dict[str, _Member] = field(default_factory=dict)
    _refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    _stood_still: dict[str, float] = field(default_factory=dict)
    """Worker id -> the lease end that nobody has moved for a lease: over, however often it is read again."""
    _failures: int = 0
    _grace_until: float = 0.0
    _serving: list[WorkerView] | None = None
    """What `routable` answers while nobody is in trouble; None when a poll has changed something."""
    _others: dict[str, str] | None = None
    _health: WorkerHealth = field(init=False)

    def __post_init__(self) -> None:
        self._health = WorkerHealth(self.cooldown_s)

    def views(self) -> list[WorkerView]:
        """Every worker in the cluster, whatever its state, ordered by id."""
        return [self._members[worker_id].view for worker_id in sorted(self._members)]

    def routable(self, now: float) -> list[WorkerView]:
        """The workers that may get a request, ordered by id: serving, and not just failed.

        One that failed is tried by one request at a time, unless there is no other. The same list, not to be
        changed, until something changes: asking costs nothing.
        """
        serving = self.serving()
        if not self._health:
            return serving
        up = [v for v in serving if not self._health.pause_s(v.record.worker_id, now)]
        return [v for v in up if not self._health.is_tried(v.record.worker_id, now)] or up

    def serving(self) -> list[WorkerView]:
        """The workers that serve, those that have just failed too; ordered by id. As `routable`, not to be
        changed."""
        if self._serving is None:
            self._serving = [v for v in self.views() if v.record.state is WorkerState.SERVING]
        return self._serving

    def excluded(self, now: float) -> dict[str, str]:
        """Why the others get none: worker id -> reason."""
        if self._others is None:
            others = (v.record for v in self.views() if v.record.state is not WorkerState.SERVING)
            self._others = {record.worker_id: f"it is {record.state}" for record in others}
        if not self._health:
            return self._others
        routable = {view.record.worker_id for view in self.routable(now)}
        reasons = dict(self._others)
        for worker_id in self._members.keys() - routable - reasons.keys():
            pause_s = self._health.pause_s(worker_id, now)
            tried = "it failed, and one request is trying it"
            reasons[worker_id] = f"it failed, and is skipped for {pause_s:.1f} s" if pause_s else tried
        return reasons

    def refusals(self) -> dict[str, str]:
        """Why workers that are registered are not in this cluster: worker id -> reason."""
        return {worker_id: reason for worker_id, (_, reason) in self._refused.items()}

    def is_draining(self, worker_id: str, epoch: int) -> bool:
        """Whether that life of a worker is about to end as planned."""
        member = self._members.get(worker_id)
        record = member.view.record if member else None
        return record is not None and record.epoch == epoch and record.state is WorkerState.DRAINING

    def report_failure(self, worker_id: str, epoch: int) -> None:
        """A request failed for the worker's sake: skip it for a while, then let it be tried again.

        A report about an epoch that is over changes nothing, and a new epoch begins without a stain.
        """
        if self._is_known(worker_id, epoch):
            pause_s = self._health.failed(worker_id, self.clock())
            log.warning("cooling down worker_id=%s epoch=%d for_s=%.3g", worker_id, epoch, pause_s)

    def report_success(self, worker_id: str, epoch: int) -> None:
        """A request got its first token there."""
        if self._health and self._is_known(worker_id, epoch):
            self._health.succeeded(worker_id, self.clock())

    def placed(self, worker_id: str) -> None:
        """A request is on its way there."""
        if self._health:
            self._health.placed(worker_id, self.clock())

    def _is_known(self, worker_id: str, epoch: int) -> bool:
        member = self._members.get(worker_id)
        return member is not None and member.view.record.epoch == epoch

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            raise_if_cancelled()
            try:
                await self.poll()
                pause = self.poll_s
            except (RedisError, OSError) as error:
                self._failures += 1
                self.counters.failed_polls += 1
                if self._failures == 1:
                    log.warning("registry not readable, keeping %d workers: %r", len(self._members), error)
                pause = backoff_s(self._failures)
            await asyncio.sleep(pause)

    async def poll(self) -> None:
        """Read the registrations once and bring the views up to date. Raises RedisError or OSError."""
        asked_at = self.clock()
        now_ms, raw = await self._read()
        if self._members and all(self._is_over(w, raw[w], now_ms, asked_at) for w in self._members):
            await self._check_writable()
        now = self.clock()
        if self._failures:
            log.info("registry readable again")
            self._failures = 0
            self._grace_until = now + self.lease_s
        for worker_id, each in raw.items():
            self._judge(worker_id, each, now_ms, asked_at, now)
        for remembered in (self._refused, self._stood_still):
            for worker_id in set(remembered) - set(raw):
                del remembered[worker_id]

    async def _check_writable(self) -> None:
        """Raise RedisError where Redis answers and takes no writes: then it is not the workers that are
        silent.

        By a write that changes nothing: there are no deadlines below 0.
        """
        await self.redis.zremrangebyscore(self.keys.workers, "-inf", "(0")

    async def _read(self) -> tuple[float, dict[str, RawWorker]]:
        answer: Any = await self.redis.eval(_LEASES, 1, self.keys.workers, str(MAX_WORKERS - 1))
        (seconds, micros), scores = answer
        deadlines = {
            member.decode(errors="replace"): float(score)
            for member, score in zip(scores[::2], scores[1::2], strict=True)
        }
        worker_ids = sorted(deadlines.keys() | self._members.keys())
        async with self.redis.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hgetall(self.keys.worker(worker_id))
                pipe.pttl(self.keys.worker(worker_id))
            # A key of another type is that worker's problem, not everybody's.
            answers = await pipe.execute(raise_on_error=False) if worker_ids else []
        raw = {}
        for worker_id, fields, expires in zip(worker_ids, answers[::2], answers[1::2], strict=True):
            if isinstance(expires, RedisError):
                raise expires  # such as LOADING: it concerns everybody
            known = fields if isinstance(fields, dict) else {b"": b""}
            raw[worker_id] = RawWorker(known, deadlines.get(worker_id, 0), expires)
        return int(seconds) * 1000 + int(micros) / 1000, raw

    def _judge(self, worker_id: str, raw: RawWorker, now_ms: float, asked_at: float, now: float) -> None:
        record = self._parse(worker_id, raw)
        left_ms = raw.left_ms(now_ms)
        if record is None or self._is_over(worker_id, raw, now_ms, asked_at):
            self._miss(worker_id, now)
        elif record.state is WorkerState.STOPPED:
            self._leave(worker_id, "stopped")
        elif reason := self.spec.mismatch(record):
            self._refuse(record, reason)
        else:
            self._refused.pop(worker_id, None)
            self._renew(record, raw.deadline_ms, left_ms, now_ms, asked_at)

    def _is_over(self, worker_id: str, raw: RawWorker, now_ms: float, asked_at: float) -> bool:
        left_ms = raw.left_ms(now_ms)
        return not raw.fields or left_ms <= 0 or self._stands_still(worker_id, left_ms + now_ms, asked_at)

    def _stands_still(self, worker_id: str, expiry_ms: float, asked_at: float) -> bool:
        """Whether a lease was not renewed for as long as it lasts: only a clock set back keeps such a one."""
        if abs(expiry_ms - self._stood_still.get(worker_id, -math.inf)) <= _RENEWED_MS:
            return True
        member = self._members.get(worker_id)
        if member is None or abs(expiry_ms - member.expiry_ms) > _RENEWED_MS:
            return False
        if asked_at - member.renewed_at <= self.lease_s:
            return False
        self._stood_still[worker_id] = member.expiry_ms
        return True

    def _parse(self, worker_id: str, raw: RawWorker) -> WorkerRecord | None:
        if not raw.fields:
            return None
        try:
            record = WorkerRecord.from_fields(raw.fields)
            if record.worker_id != worker_id:
                raise ValueError(f"record of {record.worker_id!r}")
            return record
        except ValueError as error:
            self.counters.malformed += 1
            log.debug("malformed record worker_id=%s error=%s", worker_id, error)
            return None

    def _renew(
        self, record: WorkerRecord, deadline_ms: float, left_ms: float, now_ms: float, asked_at: float
    ) -> None:
        member = self._members.get(record.worker_id)
        # A lease was written together with its report, one lease before its deadline. A full Redis renews
        # only the expiry: then the report stays as old as it is.
        report_age_s = (now_ms - deadline_ms) / 1000 + self.lease_s
        reported_at = asked_at - max(0.0, report_age_s)
        known = member is not None and member.view.record.epoch == record.epoch
        left_s = min(left_ms / 1000, self.lease_s)
        fresh = _Member(WorkerView(record, reported_at), asked_at + left_s)
        fresh.expiry_ms, fresh.renewed_at = left_ms + now_ms, asked_at
        if member is not None and known and abs(fresh.expiry_ms - member.expiry_ms) <= _RENEWED_MS:
            fresh.expiry_ms, fresh.renewed_at = member.expiry_ms, member.renewed_at
        self._members[record.worker_id] = fresh
        self._serving = self._others = None
        if not known:
            self._health.forget(record.worker_id)
            log.info("joined worker_id=%s epoch=%d at=%s", record.worker_id, record.epoch, record.address)
            for tell in self.on_join:
                tell(record)

    def _miss(self, worker_id: str, now: float) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        if member.keep_until is None:
            lost_by_redis = now < member.lease_until or now < self._grace_until
            member.keep_until = now + self.lease_s if lost_by_redis else now
        if now >= member.keep_until:
            self.counters.leases_ended += 1
            self._leave(worker_id, "lease over")

    def _refuse(self, record: WorkerRecord, reason: str) -> None:
        self._leave(record.worker_id, "refused")
        if self._refused.get(record.worker_id) != (record.epoch, reason):
            self._refused[record.worker_id] = (record.epoch, reason)
            self.counters.refused += 1
            log.error("refused worker_id=%s epoch=%d %s", record.worker_id, record.epoch, reason)

    def _leave(self, worker_id: str, why: str) -> None:
        member = self._members.pop(worker_id, None)
        if member is not None:
            self._serving = self._others = None
            self._health.forget(worker_id)
            log.info("left worker_id=%s epoch=%d: %s", worker_id, member.view.record.epoch, why)
            for tell in self.on_leave:
                tell(worker_id)
