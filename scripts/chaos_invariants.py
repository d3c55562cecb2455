"""What must hold when all is whole and at rest: nothing is held, and all tell the same story."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import redis
from redis.exceptions import RedisError

from kvhive.proto.block_hash import BlockKey, keys_digest
from kvhive.proto.errors import ClusterError
from kvhive.proto.index_schema import DATA_EXPIRY_LEASES, IndexKeys, WorkerRecord
from kvhive.scripts.chaos_client import OutsideClient
from kvhive.scripts.chaos_cluster import CLUSTER, LEASE_S
from kvhive.scripts.chaos_victims import Cluster, Router, Worker
from kvhive.worker.transfer_lanes import MAX_LANES

QUIET_WITHIN_S = 90.0
"""How long it may take until all agree; what is wrong then is wrong for good."""
_POLL_S = 0.5
SPARE_SOCKETS = 24
"""File descriptors that a process may have beyond what it had at first, for what is made at first use ..."""
SOCKETS_A_PEER = 8
"""... and a worker for each other one that it ever met: lanes both ways and a connection to ask by. Those of
the last MAX_LANES peers are kept; a leak grows beyond that."""
SPARE_TASKS = 8


@dataclass(slots=True)
class Baseline:
    """What processes had before the first fault: the most of each kind."""

    sockets: dict[str, int] = field(default_factory=dict)
    """File descriptors, by `worker` and `router`."""
    tasks: dict[str, int] = field(default_factory=dict)

    def learn(self, kind: str, sockets: int, tasks: int) -> None:
        """Remember a process."""
        self.sockets[kind] = max(sockets, self.sockets.get(kind, 0))
        self.tasks[kind] = max(tasks, self.tasks.get(kind, 0))

    def problems(self, kind: str, name: str, sockets: int, tasks: int, peers: int = 0) -> list[str]:
        """Say what a process has too much of that may have met so many peers."""
        found = []
        if sockets > self.sockets[kind] + SPARE_SOCKETS + SOCKETS_A_PEER * min(peers, MAX_LANES):
            found.append(f"{name} has {sockets} file descriptors, at first {self.sockets[kind]}")
        if tasks > self.tasks[kind] + SPARE_TASKS:
            found.append(f"{name} has {tasks} tasks, at first {self.tasks[kind]}")
        return found


class Invariants:
    """Looks at a cluster that is at rest."""

    def __init__(self, cluster: Cluster, clients: Sequence[OutsideClient]) -> None:
        self._cluster = cluster
        self._clients = clients
        self.baseline = Baseline()
        self.most: dict[str, int] = {}
        """The most file descriptors and tasks that were seen at rest, for the report."""

    async def learn(self) -> None:
        """Remember what processes have before any fault. Raises RuntimeError where something is wrong."""
        for worker in self._cluster.workers:
            status = await worker.status(audit=True)
            self.baseline.learn("worker", _sockets(worker.pid), status.audit.tasks)
        for router, client in zip(self._cluster.routers, self._clients, strict=True):
            self.baseline.learn("router", _sockets(router.pid), (await client.cluster()).audit.tasks)
        problems = await self.broken()
        if problems:
            raise RuntimeError(f"without any fault: {problems}")

    async def broken(self) -> list[str]:
        """Return what does not hold, or nothing as soon as all holds; waits up to QUIET_WITHIN_S for that."""
        deadline = time.monotonic() + QUIET_WITHIN_S
        while True:
            try:
                problems = await self._look()
            except (grpc.aio.AioRpcError, RedisError, OSError, ClusterError) as error:
                problems = [f"cannot be looked at: {error!r}"[:500]]
            if not problems or time.monotonic() > deadline:
                return problems
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> list[str]:
        problems = await self._cluster.look()
        if problems:
            return problems
        audits = {}
        for worker in self._cluster.workers:
            status = await worker.status(audit=True)
            audits[worker.worker_id] = status
            problems += self._worker_problems(worker, status)
        records = await asyncio.to_thread(self._redis_problems, audits, problems)
        for router, client in zip(self._cluster.routers, self._clients, strict=True):
            problems += self._router_problems(router, await client.cluster(), audits, records)
        return problems

    def _worker_problems(self, worker: Worker, status: Any) -> list[str]:
        name, audit = worker.worker_id, status.audit
        problems = []
        parts = status.blocks_live + status.blocks_cached + status.blocks_free
        if parts != status.blocks_total:
            problems.append(f"{name}: live + cached + free is {parts} of {status.blocks_total} blocks")
        if status.blocks_cached != audit.blocks:
            problems.append(f"{name}: {status.blocks_cached} blocks are cached, {audit.blocks} can be found")
        held = {
            "live blocks": status.blocks_live,
            "pinned blocks": audit.pinned_blocks,
            "running": status.running,
            "waiting": status.waiting,
            "queued prefill tokens": status.queued_prefill_tokens,
            "open requests": audit.open_requests,
        }
        problems += [f"{name} has {count} {what}" for what, count in held.items() if count]
        if audit.sessions > len(self._cluster.routers):
            problems.append(f"{name} has {audit.sessions} sessions")
        return problems + self._counts("worker", name, worker.pid, audit.tasks, self._peers())

    def _peers(self) -> int:
        """How many others there may have been: ids are numbered, and none is used twice."""
        return max(int(worker.worker_id.lstrip("w")) for worker in self._cluster.workers) - 1

    def _router_problems(
        self, router: Router, seen: Any, audits: dict[str, Any], records: dict[str, WorkerRecord]
    ) -> list[str]:
        name, audit = router.name, seen.audit
        problems = []
        for what, count in (("placed", audit.placed_requests), ("open", audit.open_requests)):
            if count:
                problems.append(f"{name} has {count} {what} requests")
        known = {w.id: w.epoch for w in seen.workers if w.state == "serving"}
        wanted = {worker_id: record.epoch for worker_id, record in records.items()}
        if known != wanted:
            problems.append(f"{name} knows {known} and not {wanted}")
        for worker_id, status in audits.items():
            copy = audit.mirror[worker_id]
            if (copy.blocks, copy.digest) != (status.audit.blocks, status.audit.digest):
                problems.append(
                    f"{name} has {copy.blocks} blocks of {worker_id}, which has {status.audit.blocks}"
                )
        if not seen.index.connected:
            problems.append(f"{name} has not heard of the index for {seen.index.staleness_s:.1f} s")
        return problems + self._counts("router", name, router.pid, audit.tasks)

    def _counts(self, kind: str, name: str, pid: int, tasks: int, peers: int = 0) -> list[str]:
        sockets = _sockets(pid)
        for what, count in ((f"{kind} file descriptors", sockets), (f"{kind} tasks", tasks)):
            self.most[what] = max(count, self.most.get(what, 0))
        return self.baseline.problems(kind, name, sockets, tasks, peers)

    def _redis_problems(self, audits: dict[str, Any], problems: list[str]) -> dict[str, WorkerRecord]:
        """Compare what is in Redis with the workers; return their records. Adds to `problems`."""
        keys, records = IndexKeys(CLUSTER), dict[str, WorkerRecord]()
        master = self._cluster.redis.master()
        with master.client() as client:
            wanted = {keys.workers.encode()}
            for worker_id, status in audits.items():
                raw: Any = client.hgetall(keys.worker(worker_id))
                try:
                    record = records[worker_id] = WorkerRecord.from_fields(raw)
                except ValueError as error:
                    problems.append(f"{worker_id} is not in Redis: {error}")
                    continue
                if record.epoch != status.epoch or record.load.accounting_errors:
                    problems.append(f"{worker_id} is of epoch {status.epoch}, in Redis {record}")
                blocks = keys.blocks(worker_id, record.epoch)
                members: Any = client.smembers(blocks)
                if (len(members), _digest(members)) != (status.audit.blocks, status.audit.digest):
                    problems.append(f"{worker_id} has {status.audit.blocks} blocks, in Redis {len(members)}")
                own = (keys.worker(worker_id), blocks, keys.events(worker_id, record.epoch))
                wanted |= {key.encode() for key in own}
            problems += _stray_keys(client, wanted)
        return records


def _stray_keys(client: redis.Redis, wanted: set[bytes]) -> list[str]:
    """Say which keys are nobody's, or would stay for ever."""
    problems = []
    longest_ms = 1000 * LEASE_S * (DATA_EXPIRY_LEASES + 1)
    for key in client.scan_iter(count=1000):
        left_ms = int(client.pttl(key))
        if left_ms == -2:  # it has just gone
            continue
        if not 0 <= left_ms <= longest_ms:
            problems.append(f"{key!r} expires in {left_ms} ms")
        elif key not in wanted:
            problems.append(f"{key!r} belongs to nobody")
    return problems


def _digest(members: set[bytes]) -> int:
    return keys_digest(BlockKey(member) for member in members)


def _sockets(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
