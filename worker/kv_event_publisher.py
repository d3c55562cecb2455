"""Keeps this worker's part of the index true: its lease, its load, and which blocks it holds.

One task does everything over one connection, in order, so nothing here races with itself. Each script
checks that Redis still has what was acknowledged before it writes; so an emptied, restored or replaced
Redis is noticed by the first write that reaches it, and answered with a new epoch and a snapshot. A Redis
that is away or full costs the worker nothing but freshness: changes collapse in EventDelta meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError, ResponseError

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import KEYS_PER_BATCH, IndexKeys, LoadReport, WorkerRecord, WorkerState
from kvhive.proto.kv_events import EventBatch, KvEvent
from kvhive.proto.retry import backoff_s, raise_if_cancelled
from kvhive.worker import index_scripts
from kvhive.worker.event_delta import EventDelta
from kvhive.worker.index_calls import Acknowledged, IndexCall, IndexCalls

log = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 0.005
"""Least time between two batches, so that a fast engine does not cost Redis a script per step."""
STATE_TIMEOUT_S = 1.0
"""Longest `set_state` waits for Redis to have heard; the state is published later all the same."""
CLOSE_TIMEOUT_S = 2.0

_NOT_OURS = "WRONGTYPE", "equal or smaller"
"""What Redis says of keys that others wrote to: of another type, or a stream with larger ids. Whatever
else it says (busy, without a master, read-only), our keys may be well, and are found well or LOST."""


@dataclass(slots=True)
class PublisherCounters:
    """What happened since the publisher was made."""

    published_batches: int = 0
    retries: int = 0
    """Failed conversations with Redis; each is tried again."""
    resnapshots: int = 0
    """Times everything was published anew because Redis had lost or refused something."""
    fenced: int = 0
    """Times a newer incarnation of this worker id was found in charge."""


class KvEventPublisher:
    """Registers one worker and publishes its block events.

    `add` may be called from any one thread, everything else belongs to the event loop of `run`. `record` is
    the registration with epoch 0; `load` is asked at every heartbeat and must not block. `clock` is
    monotonic, in seconds. The Redis client should have a socket timeout and few retries of its own.
    """

    def __init__(
        self,
        redis: Redis,
        keys: IndexKeys,
        record: WorkerRecord,
        lease_s: float,
        heartbeat_s: float,
        load: Callable[[], LoadReport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = PublisherCounters()
        self._redis = redis
        lease_ms = max(1, round(lease_s * 1000))
        self._calls = IndexCalls(keys, record.worker_id, lease_ms, secrets.token_hex(8))
        self._record = record
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._clock = clock
        self._delta = EventDelta()
        self._registered = False
        self._known = Acknowledged(0)
        self._in_flight: EventBatch | None = None
        """Taken from the delta and not acknowledged; after a lost answer Redis may have it or not."""
        self._heartbeat_due = 0.0
        self._publish_after = 0.0
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._wake_requested = False
        self._beaten = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def epoch(self) -> int:
        """The epoch of the last registration; 0 before the first."""
        return self._record.epoch

    @property
    def lag_batches(self) -> int:
        """Batches that Redis has not accepted yet."""
        return -(-self._delta.pending // KEYS_PER_BATCH) + (self._in_flight is not None)

    def held(self) -> frozenset[BlockKey]:
        """The keys the worker holds according to the events so far; O(held)."""
        return self._delta.held()

    def add(self, events: Iterable[KvEvent]) -> None:
        """Take in events in the order they happened. Thread-safe, O(events), never waits for I/O."""
        self._delta.add(events)
        loop = self._loop
        if loop is not None and self._delta.pending and not self._wake_requested:
            self._wake_requested = True
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                log.debug("events after the event loop closed worker_id=%s", self._record.worker_id)

    async def run(self) -> None:
        """Register, then keep lease and blocks up to date until `close` or cancellation."""
        self._loop = asyncio.get_running_loop()
        self._idle.clear()
        try:
            while not self._close_requested.is_set():
                raise_if_cancelled()
                try:
                    await self._advance()
                    self._recovered()
                except (RedisError, OSError) as error:
                    await self._pause(self._failed(error))
                    continue
                await self._pause(self._next_due())
        finally:
            self._loop = None
            self._idle.set()

    async def set_state(self, state: WorkerState) -> None:
        """Publish a new state at once; returns when Redis has it, or after STATE_TIMEOUT_S at the latest."""
        self._record = replace(self._record, state=state)
        self._heartbeat_due = 0.0
        self._beaten.clear()
        self._wake.set()
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                await self._beaten.wait()
        except TimeoutError:
            log.warning("state not published yet worker_id=%s state=%s", self._record.worker_id, state)

    async def close(self) -> None:
        """Deregister as well as Redis allows within CLOSE_TIMEOUT_S. Ends `run`; idempotent."""
        if self._close_requested.is_set():
            return
        self._close_requested.set()
        self._wake.set()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._idle.wait()
                if self._registered:
                    self._registered = False
                    status, *_ = await self._run(self._calls.deregister(self.epoch))
                    if status == index_scripts.OK:
                        await self._redis.zrem(self._calls.keys.workers, self._id)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("not deregistered, the lease will end worker_id=%s error=%r", self._id, error)

    @property
    def _id(self) -> str:
        return self._record.worker_id

    async def _advance(self) -> None:
        """Do what is due, one conversation with Redis at most each: register, heartbeat, publish."""
        if not self._registered:
            await self._register()
        if self._registered and self._clock() >= self._heartbeat_due:
            await self._heartbeat()
        if self._registered and self._clock() >= self._publish_after:
            await self._publish()

    async def _register(self) -> None:
        state, last_epoch = self._record.state, self._record.epoch
        status, epoch, *found = await self._run(self._calls.register(self._report()))
        if status == index_scripts.FENCED:
            self._fence(int(epoch))
        self._record = replace(self._record, epoch=int(epoch))
        self._known = Acknowledged(int(epoch))
        self._in_flight = None
        self._delta.restart()
        self._registered = True
        await self._renew_lease()
        if state is self._record.state:
            self._heartbeat_due = self._clock() + self._heartbeat_s
            self._beaten.set()
        log.info("registered worker_id=%s epoch=%d blocks=%d", self._id, self.epoch, self._delta.pending)
        for old in {last_epoch, *(int(each) for each in found)} - {0}:
            # Would expire by itself; unlinked now so that a worker restarting in a loop does not fill Redis.
            await self._redis.unlink(self._calls.blocks(old), self._calls.events(old))

    async def _heartbeat(self) -> None:
        state = self._record.state
        self._heartbeat_due = self._clock() + self._heartbeat_s
        in_doubt = self._in_flight is not None
        status, *rest = await self._run(self._calls.heartbeat(self._report(), self._known, in_doubt))
        if status == index_scripts.FULL:
            await self._relieve()
            raise OutOfMemoryError("Redis is full; the lease was renewed without a load report")
        if self._accepted(status, rest):
            await self._renew_lease()
            if state is self._record.state:
                self._beaten.set()

    async def _renew_lease(self) -> None:
        """Renew our place among the workers, and take out the few that are named as over and really gone.

        Another conversation than the record's, because in a Redis Cluster the two are on different nodes.
        A router goes by the record; this is how it finds records, and how old their reports are.
        """
        status, *over = await self._run(self._calls.lease())
        if status == index_scripts.FULL:
            await self._relieve()
            return
        gone = [
            worker_id
            for worker_id in over
            if not await self._redis.exists(self._calls.keys.worker(worker_id.decode(errors="replace")))
        ]
        if gone:
            await self._run(self._calls.forget(gone))

    async def _publish(self) -> None:
        """Send one batch: the one whose answer is missing, or the oldest pending changes."""
        batch = self._in_flight or self._delta.take(KEYS_PER_BATCH)
        if not len(batch):
            return
        self._in_flight = batch
        try:
            status, *rest = await self._run(self._calls.publish(self._known, batch))
        except OutOfMemoryError:
            await self._relieve()
            raise
        if self._accepted(status, rest):
            self._known = self._known.after(batch)
            self._in_flight = None
            self._publish_after = self._clock() + PUBLISH_INTERVAL_S
            self.counters.published_batches += 1

    async def _relieve(self) -> None:
        """Give a full Redis our stream's memory back; readers that are behind take a snapshot instead."""
        await self._redis.unlink(self._calls.events(self.epoch))

    def _accepted(self, status: bytes, rest: list[bytes]) -> bool:
        if status == index_scripts.OK:
            return True
        if status == index_scripts.FENCED and int(rest[0]) < self.epoch:
            self._start_over("Redis has an older record")
        elif status == index_scripts.FENCED:
            self._fence(int(rest[0]))
        elif status == index_scripts.EXPIRED:
            self._heartbeat_due = (
                0.0  # brings the record back under this epoch, if the blocks are still there
            )
        elif status == index_scripts.LOST:
            self._start_over("Redis lost what it had acknowledged")
        return False

    def _start_over(self, reason: str) -> None:
        if self._registered:
            self._registered = False
            self.counters.resnapshots += 1
            log.warning("new epoch and snapshot worker_id=%s epoch=%d: %s", self._id, self.epoch, reason)

    def _fence(self, newer_epoch: int) -> NoReturn:
        """A newer incarnation is alive: stay silent, and take over only when its lease is over."""
        if self._registered:
            self._registered = False
            self.counters.fenced += 1
            log.error("fenced worker_id=%s epoch=%d newer_epoch=%d", self._id, self.epoch, newer_epoch)
        raise RedisError(f"worker id {self._id} belongs to epoch {newer_epoch}")

    def _report(self) -> WorkerRecord:
        return replace(self._record, load=replace(self._load(), index_lag_batches=self.lag_batches))

    async def _run(self, call: IndexCall) -> list[bytes]:
        """Run a script by its digest; a server that has not seen it yet gets the text."""
        count, parts = len(call.keys), (*call.keys, *call.arguments)
        try:
            answer = await self._redis.evalsha(call.script.sha, count, *parts)
        except NoScriptError:
            answer = await self._redis.eval(call.script.text, count, *parts)
        return list(answer)

    def _failed(self, error: RedisError | OSError) -> float:
        """Count and log a failure; return the seconds to wait before the next try."""
        self._failures += 1
        self.counters.retries += 1
        self._heartbeat_due = 0.0  # the lease comes first when Redis is back
        if self._failures == 1:
            log.warning("index not writable worker_id=%s epoch=%d error=%r", self._id, self.epoch, error)
        if isinstance(error, ResponseError) and any(words in str(error) for words in _NOT_OURS):
            self._start_over(repr(error))
        return backoff_s(self._failures)

    def _recovered(self) -> None:
        if self._failures:
            log.info("index writable again worker_id=%s epoch=%d", self._id, self.epoch)
            self._failures = 0

    def _next_due(self) -> float:
        """Seconds until there is something to do; events and state changes wake earlier."""
        now = self._clock()
        if not self._registered:
            return 0.0
        due = self._heartbeat_due
        if self._in_flight is not None or self._delta.pending:
            due = min(due, self._publish_after)
        return max(0.0, due - now)

    async def _pause(self, seconds: float) -> None:
        """Wait; new events end the wait while Redis works, and closing always does."""
        alarm = self._close_requested if self._failures else self._wake
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await alarm.wait()
        # In this order: who adds events after the flag is down wakes us, who did before is seen as pending.
        self._wake.clear()
        self._wake_requested = False
