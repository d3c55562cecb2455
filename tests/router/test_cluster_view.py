"""GetCluster says what registry, mirror and reader know, no more and no less."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis
from worker_records import KEYS, LEASE_S, SPEC, Clock, record, register

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import LoadReport, WorkerState
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.cluster_view import CONNECTED_WITHIN_S, ClusterView
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.worker_registry import WorkerRegistry


@dataclass
class Seen:
    """A view and all that it reads."""

    view: ClusterView
    mirror: KvIndexMirror
    clock: Clock

    def workers(self) -> dict[str, pb.WorkerInfo]:
        return {worker.id: worker for worker in self.view.describe().workers}


@pytest.fixture
def seen(index_redis: Redis) -> Seen:
    clock = Clock()
    registry = WorkerRegistry(index_redis, KEYS, SPEC, LEASE_S, cooldown_s=5.0, clock=clock)
    mirror = KvIndexMirror(clock=clock)
    reader = KvIndexReader(index_redis, KEYS, registry, mirror, clock)
    view = ClusterView("prod", "demo", "1.2.3", registry, mirror, reader, clock)
    return Seen(view, mirror, clock)


def block(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


async def test_an_empty_cluster_is_described_too(seen: Seen) -> None:
    """Before Redis was ever heard of, the index is infinitely old and not connected."""
    response = seen.view.describe()
    assert (response.cluster, response.model, response.version) == ("prod", "demo", "1.2.3")
    assert list(response.workers) == []
    assert response.index == pb.IndexInfo(staleness_s=math.inf, blocks=0, resyncs=0, connected=False)


async def test_a_worker_is_described_by_its_record_and_its_index(index_redis: Redis, seen: Seen) -> None:
    load = LoadReport(
        queued_prefill_tokens=1,
        running=2,
        waiting=3,
        blocks_total=15,
        blocks_live=4,
        blocks_cached=5,
        blocks_free=6,
        blocks_pinned=2,
        preemptions=7,
        prefix_queries=9,
        prefix_hits=8,
        drafted_tokens=10,
        accepted_tokens=6,
    )
    await register(index_redis, record("w1", 42, address="10.0.0.1:7", device="cuda:0", pid=11, load=load))
    await seen.view.registry.poll()
    seen.mirror.replace("w1", [block(1), block(2)])
    assert seen.workers()["w1"] == pb.WorkerInfo(
        id="w1",
        state="serving",
        epoch=42,
        address="10.0.0.1:7",
        device="cuda:0",
        pid=11,
        blocks=pb.Blocks(total=15, live=4, cached=5, free=6, pinned=2),
        running=2,
        waiting=3,
        queued_prefill_tokens=1,
        prefix_query_tokens=9,
        prefix_hit_tokens=8,
        preemptions=7,
        indexed_blocks=2,
        routable=True,
        drafted_tokens=10,
        accepted_tokens=6,
    )


async def test_only_serving_workers_that_do_not_cool_down_are_routable(
    index_redis: Redis, seen: Seen
) -> None:
    for state in (WorkerState.STARTING, WorkerState.SERVING, WorkerState.DRAINING):
        await register(index_redis, record(state.value, state=state))
    await seen.view.registry.poll()
    assert [(w.id, w.state, w.routable) for w in seen.view.describe().workers] == [
        ("draining", "draining", False),
        ("serving", "serving", True),
        ("starting", "starting", False),
    ]
    seen.view.registry.report_failure("serving", epoch=1)
    assert not seen.workers()["serving"].routable
    seen.clock.now += 5.0
    assert seen.workers()["serving"].routable


async def test_the_index_counts_every_workers_blocks_and_knows_its_age(seen: Seen) -> None:
    seen.mirror.replace("w1", [block(1), block(2)])
    seen.mirror.replace("w2", [block(2)])
    seen.mirror.touch(seen.clock())
    seen.view.reader.counters.resyncs = 3
    assert seen.view.describe().index == pb.IndexInfo(staleness_s=0, blocks=3, resyncs=3, connected=True)
    seen.clock.now += CONNECTED_WITHIN_S
    index = seen.view.describe().index
    assert (index.staleness_s, index.connected) == (CONNECTED_WITHIN_S, False)
