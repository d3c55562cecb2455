"""What every KvIndex promises, by the mirror and by look-ups in Redis, on Redis and on Valkey, with real
publishers; a Redis Cluster included."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest
from index_rig import IDENTITY, KEYS, LEASE_S, key, removed, running, stored, worker
from redis.asyncio import Redis
from redis_fixtures import eventually, kill
from redis_kinds import cluster

from kvhive.proto.block_hash import BlockKey
from kvhive.router.kv_index import KvIndex
from kvhive.router.kv_index_choice import IndexKind, KvIndexChoice
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.kv_index_redis import KvIndexRedis
from kvhive.router.redis_connection import open_redis
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.kv_event_publisher import KvEventPublisher

Server = tuple[EmbeddedRedis | None, Redis]


@dataclass
class Asked:
    """An index as a router uses it."""

    index: KvIndex
    registry: WorkerRegistry

    async def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        await self.index.prepare(keys)
        return dict(self.index.match(keys))

    async def becomes(self, keys: Sequence[BlockKey], expected: dict[str, int]) -> None:
        async def holds() -> bool:
            return await self.match(keys) == expected

        await eventually(holds, 20)


@pytest.fixture(scope="module", params=["valkey", "redis", "cluster"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EmbeddedRedis | None, str]]:
    """A server of one kind and its URL."""
    folder = tmp_path_factory.mktemp("contract") / "server"
    if request.param == "cluster":
        with cluster(folder) as url:
            yield None, url
        return
    if request.param == "redis" and shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH: docs/index.md says when this was last run on Redis")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "valkey":
            patch.setattr("kvhive.scripts.embedded_redis.shutil.which", lambda name: None)
        with EmbeddedRedis(folder) as embedded:
            yield embedded, embedded.url


@pytest.fixture
async def server(started: tuple[EmbeddedRedis | None, str]) -> AsyncIterator[Server]:
    """The server, emptied, and a client of it."""
    embedded, url = started
    client = open_redis(url, 2.0)
    await client.flushall()
    yield embedded, client
    await client.aclose()


@pytest.fixture(params=list(IndexKind))
async def asked(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Asked]:
    """The index of one configuration; `auto` has outgrown its mirror."""
    redis = server[1]
    registry = WorkerRegistry(redis, KEYS, ModelSpec(IDENTITY, 16), LEASE_S, 1.0, poll_s=0.05)
    mirror = KvIndexMirror()
    reader, remote = KvIndexReader(redis, KEYS, registry, mirror), KvIndexRedis(redis, KEYS, registry)
    index = KvIndexChoice(request.param, 0, mirror, reader, remote)
    async with running(registry, index):
        yield Asked(index, registry)


def chain_to(leaf: int) -> list[BlockKey]:
    """The chain that ends in block `leaf` of a binary tree whose root is 1."""
    return [key(leaf >> shift) for shift in range(leaf.bit_length() - 1, -1, -1)]


async def told(*publishers: KvEventPublisher) -> None:
    await eventually(lambda: all(each.lag_batches == 0 for each in publishers), 20)


async def test_an_empty_chain_matches_nobody_and_an_unknown_worker_holds_nothing(asked: Asked) -> None:
    assert await asked.match([]) == {}
    assert await asked.match([key(1)]) == {}
    assert asked.index.block_count("nobody") == asked.index.total_blocks() == 0


async def test_every_length_of_every_worker(asked: Asked, server: Server) -> None:
    """Prefix-closed caches of three workers, grown and shrunk at random: each chain's lengths are exact."""
    rng, redis = random.Random(5), server[1]
    async with worker(redis, "w1") as w1, worker(redis, "w2") as w2, worker(redis, "w3") as w3:
        publishers = {"w1": w1, "w2": w2, "w3": w3}
        truth: dict[str, set[int]] = {worker_id: set() for worker_id in publishers}
        for worker_id, held in truth.items():
            for leaf in rng.sample(range(1, 256), 40):
                path = [leaf >> shift for shift in range(leaf.bit_length() - 1, -1, -1)]
                publishers[worker_id].add(stored(*(n for n in path if n not in held)))
                held.update(path)
            for leaf in rng.sample(sorted(held), 30):
                if leaf in held and not {2 * leaf, 2 * leaf + 1} & held:
                    held.discard(leaf)
                    publishers[worker_id].add(removed(leaf))
        await told(w1, w2, w3)
        for leaf in rng.sample(range(1, 256), 40):
            keys = chain_to(leaf)
            lengths = {}
            for worker_id, held in truth.items():
                n = next((i for i, k in enumerate(keys) if int.from_bytes(k, "big") not in held), len(keys))
                if n:
                    lengths[worker_id] = n
            await asked.becomes(keys, lengths)
        await eventually(lambda: asked.index.total_blocks() == sum(map(len, truth.values())))
        assert asked.index.block_count("w2") == len(truth["w2"])


async def test_a_long_prompt(asked: Asked, server: Server) -> None:
    """Longer than a batch, and found to the block."""
    keys = [key(n) for n in range(1, 5001)]
    async with worker(server[1], "w1") as w1, worker(server[1], "w2") as w2:
        w1.add(stored(*range(1, 4322)))
        w2.add(stored(1))
        await told(w1, w2)
        await asked.becomes(keys, {"w1": 4321, "w2": 1})
        w1.add(removed(*range(4321, 4000, -1)))
        await asked.becomes(keys, {"w1": 4000, "w2": 1})
        assert await asked.match([key(9999), *keys]) == {}


async def test_who_leaves_or_begins_anew_holds_nothing(asked: Asked, server: Server) -> None:
    """A restart under the same id, without a farewell, and then a farewell."""
    keys = [key(n) for n in range(1, 10)]
    async with worker(server[1]) as first:
        first.add(stored(*range(1, 10)))
        await asked.becomes(keys, {"w1": 9})
    async with worker(server[1]) as second:
        await asked.becomes(keys, {})
        second.add(stored(1, 2))
        await asked.becomes(keys, {"w1": 2})
        await second.close()
        await asked.becomes(keys, {})
        await eventually(lambda: asked.index.block_count("w1") == 0)


async def test_a_redis_that_dies_delays_nobody_and_all_is_well_again(asked: Asked, server: Server) -> None:
    """Matching goes on without an error, the index says how old it is, and afterwards equals the truth."""
    embedded, redis = server
    if embedded is None:
        pytest.skip("the cluster's one node is not ours to kill")
    keys = [key(n) for n in range(1, 10)]
    async with worker(redis) as w1:
        w1.add(stored(*range(1, 10)))
        await asked.becomes(keys, {"w1": 9})
        kill(embedded)
        w1.add(removed(9, 8))
        await eventually(lambda: asked.index.staleness_s() > 0.5)
        for _ in range(50):
            assert (await asked.match(keys)).get("w1", 0) <= 9
        await asyncio.to_thread(embedded.restart)
        await asked.becomes(keys, {"w1": 7})
        await eventually(lambda: asked.index.staleness_s() < 1.5)


async def test_auto_begins_as_the_mirror_and_changes_once(index_redis: Redis) -> None:
    """At the configured number of blocks, and without a moment in which a held prefix is unknown."""
    registry = WorkerRegistry(index_redis, KEYS, ModelSpec(IDENTITY, 16), LEASE_S, 1.0, poll_s=0.05)
    mirror = KvIndexMirror()
    reader = KvIndexReader(index_redis, KEYS, registry, mirror)
    index = KvIndexChoice(IndexKind.AUTO, 100, mirror, reader, KvIndexRedis(index_redis, KEYS, registry))
    asked = Asked(index, registry)
    keys = [key(n) for n in range(1, 101)]
    async with running(registry, index), worker(index_redis) as w1:
        w1.add(stored(*range(1, 101)))
        await asked.becomes(keys, {"w1": 100})
        assert index.kind is IndexKind.MIRROR
        w1.add(stored(1000))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while index.kind is IndexKind.MIRROR:
                    assert await asked.match(keys) == {"w1": 100}
                    await asyncio.sleep(0.005)
        assert index.kind is IndexKind.REDIS
        assert await asked.match(keys) == {"w1": 100}
        await eventually(lambda: mirror.total_blocks() == mirror.distinct_blocks() == 0)
        w1.add(stored(1001))
        await asked.becomes([key(1001)], {"w1": 1})
        assert mirror.total_blocks() == 0
