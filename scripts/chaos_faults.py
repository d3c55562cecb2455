"""The faults of a chaos run: what is done to workers, routers and Redis, and how each comes back.

Faults overlap as chance has it, but one worker and one router are always left alone, and Redis has one
trouble at a time: that is when a cluster has to answer. Now and then all workers are struck at once, and then
it has to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from kvhive.proto.errors import ClusterError
from kvhive.scripts.chaos_redis import RedisServer
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_victims import Cluster, Router, Worker

LONGEST_FREEZE_S = 8.0
"""Longer than a lease, so that some of the frozen are given up; most are back sooner."""
LONGEST_ABSENCE_S = 2.0
STOP_S = 20.0
"""Who was told to end is killed after that."""
MOST_AT_ONCE = 8
REDIS = "redis"

Doing = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind. `aim` returns what is to be done now, or None where nobody may be struck so now."""

    name: str
    weight: float
    aim: Callable[[], Doing | None]


class Faults:
    """Strikes a cluster. Everything random comes from one seed; how it falls together does not.

    What only some clusters have is struck by chaos_link_faults.py and chaos_ray_faults.py.
    """

    def __init__(self, cluster: Cluster, trouble: Trouble, seed: str) -> None:
        self._cluster = cluster
        self._trouble = trouble
        self._chance = random.Random(f"faults {seed}")
        self._under_way: set[asyncio.Task[None]] = set()
        self._redis_in_trouble = False
        self.failures: list[str] = []
        """What did not come back as it should: each is a violation."""
        self.kinds = [
            Fault("worker_kill", 4, lambda: self._at_worker(self._kill_worker)),
            Fault("worker_freeze", 4, lambda: self._at_worker(self._freeze_worker)),
            Fault("worker_restart", 2, lambda: self._at_worker(self._restart_worker)),
            Fault("router_kill", 1, lambda: self._at_router(self._kill_router)),
            Fault("router_freeze", 2, lambda: self._at_router(self._freeze_router)),
            Fault("router_restart", 1, lambda: self._at_router(self._restart_router)),
            Fault("redis_flush", 2, lambda: self._at_redis(self._flush_redis)),
            Fault("redis_kill", 1, lambda: self._at_redis(self._kill_redis)),
            Fault("redis_freeze", 2, lambda: self._at_redis(self._freeze_redis)),
            Fault("all_workers", 2, self._at_all_workers),
        ]
        if cluster.redis.watcher is not None:
            self.kinds.append(Fault("redis_failover", 1.5, lambda: self._at_redis(self._fail_redis_over)))

    async def run(self, gap_s: float) -> None:
        """Strike again and again, `gap_s` apart on average, until cancelled; then see `heal`."""
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / gap_s))
            if len(self._under_way) < MOST_AT_ONCE:
                self.strike()

    def strike(self) -> None:
        """Do one thing that is possible now."""
        kinds = list(self.kinds)
        while kinds:
            [kind] = self._chance.choices(kinds, [k.weight for k in kinds])
            kinds.remove(kind)
            doing = kind.aim()
            if doing is not None:
                task = asyncio.create_task(self._guarded(kind.name, doing))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
                return

    async def heal(self) -> None:
        """Wait until all that was struck is back."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _guarded(self, name: str, doing: Doing) -> None:
        try:
            await doing
        except (ClusterError, RedisError, OSError) as error:
            self.failures.append(f"after {name}: {error!r}"[:500])

    # Workers.

    def _at_worker(self, how: Callable[[Worker], Doing]) -> Doing | None:
        whole = [w for w in self._cluster.workers if w.worker_id not in self._trouble.struck]
        return how(self._chance.choice(whole)) if len(whole) > 1 else None

    async def _kill_worker(self, worker: Worker) -> None:
        with self._trouble.striking("worker_kill", worker.worker_id):
            await asyncio.to_thread(worker.end)
            await asyncio.sleep(self._chance.uniform(0, LONGEST_ABSENCE_S))
            await asyncio.to_thread(worker.start)

    async def _freeze_worker(self, worker: Worker) -> None:
        with self._trouble.striking("worker_freeze", worker.worker_id):
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(self._freeze_s())
            worker.signal(signal.SIGCONT)

    async def _restart_worker(self, worker: Worker) -> None:
        with self._trouble.striking("worker_restart", worker.worker_id):
            await asyncio.to_thread(worker.retire, STOP_S)
            await asyncio.to_thread(worker.start)

    def _at_all_workers(self) -> Doing | None:
        if any(w.worker_id in self._trouble.struck for w in self._cluster.workers):
            return None
        return self._strike_all_workers()

    async def _strike_all_workers(self) -> None:
        workers, kill = self._cluster.workers, self._chance.random() < 0.5
        with self._trouble.striking("all_workers", *(w.worker_id for w in workers)), self._trouble.darkness():
            for worker in workers:
                if kill:
                    await asyncio.to_thread(worker.end)
                else:
                    worker.signal(signal.SIGSTOP)
            await asyncio.sleep(self._chance.uniform(0.5, LONGEST_ABSENCE_S))
            for worker in workers:
                if kill:
                    await asyncio.to_thread(worker.start)
                else:
                    worker.signal(signal.SIGCONT)

    # Routers.

    def _at_router(self, how: Callable[[Router], Doing]) -> Doing | None:
        whole = [r for r in self._cluster.routers if r.name not in self._trouble.struck]
        return how(self._chance.choice(whole)) if len(whole) > 1 else None

    async def _kill_router(self, router: Router) -> None:
        with self._trouble.striking("router_kill", router.name):
            await asyncio.to_thread(router.end)
            await asyncio.to_thread(router.start)

    async def _freeze_router(self, router: Router) -> None:
        with self._trouble.striking("router_freeze", router.name):
            router.signal(signal.SIGSTOP)
            await asyncio.sleep(self._freeze_s())
            router.signal(signal.SIGCONT)

    async def _restart_router(self, router: Router) -> None:
        with self._trouble.striking("router_restart", router.name):
            await asyncio.to_thread(router.retire, STOP_S)
            await asyncio.to_thread(router.start)

    # Redis.

    def _at_redis(self, how: Callable[[RedisServer], Doing]) -> Doing | None:
        return None if self._redis_in_trouble else self._one_redis_fault(how)

    async def _one_redis_fault(self, how: Callable[[RedisServer], Doing]) -> None:
        self._redis_in_trouble = True  # until its servers are in step again, which is later than the fault
        try:
            await how(await asyncio.to_thread(self._cluster.redis.master))
            await asyncio.to_thread(self._cluster.redis.wait_whole)
        finally:
            self._redis_in_trouble = False

    async def _flush_redis(self, master: RedisServer) -> None:
        with self._trouble.striking("redis_flush", REDIS):
            await asyncio.to_thread(_flush, master)

    async def _kill_redis(self, master: RedisServer) -> None:
        with self._trouble.striking("redis_kill", REDIS):
            await asyncio.to_thread(master.end, self._chance.random() < 0.5)
            await asyncio.sleep(self._chance.uniform(0, LONGEST_FREEZE_S))
            await asyncio.to_thread(master.start)

    async def _freeze_redis(self, master: RedisServer) -> None:
        with self._trouble.striking("redis_freeze", REDIS):
            master.signal(signal.SIGSTOP)
            await asyncio.sleep(self._freeze_s())
            master.signal(signal.SIGCONT)

    async def _fail_redis_over(self, master: RedisServer) -> None:
        unsure = contextlib.suppress(redis.ResponseError)  # it does not know yet that the replica is well
        with self._trouble.striking("redis_failover", REDIS), unsure:
            await asyncio.to_thread(self._cluster.redis.fail_over)

    def _freeze_s(self) -> float:
        return min(LONGEST_FREEZE_S, 0.2 + self._chance.expovariate(0.5))


def _flush(server: RedisServer) -> None:
    with server.client() as client, contextlib.suppress(redis.ReadOnlyError):  # a failover came first
        client.flushall()
