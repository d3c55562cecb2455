"""The wall clock of one host jumps by an hour: leases go by Redis' clock, ages by monotonic differences.

A clock that can be set stands between the process and the kernel (support/host_clock.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_clock import HostClock, build_host_clock
from lone_processes import LONE_LEASE_S, lone_router, lone_worker
from redis_fixtures import connect

from kvhive.scripts.embedded_redis import EmbeddedRedis

HOUR_S = 3600
HOSTS = "redis", "router", "worker"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def clocks(library: Path, tmp_path: Path) -> dict[str, HostClock]:
    return {host: HostClock(library, tmp_path / host) for host in HOSTS}


@pytest.fixture
def server(clocks: dict[str, HostClock], tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clocks["redis"].environment.items():
            patch.setenv(name, value)
        server = EmbeddedRedis(tmp_path / "server")
        server.start()
    yield server
    server.stop()


async def test_an_hour_forward_and_back_on_each_host_in_turn(
    server: EmbeddedRedis, clocks: dict[str, HostClock]
) -> None:
    """Whoever's clock it is, the worker stays or comes back, and what it holds is soon known. On a worker's
    or a router's host nothing happens at all."""
    async with (
        connect(server.url) as redis,
        lone_router(server.url, clocks["router"].environment) as router,
        lone_worker(server.url, clocks["worker"].environment) as worker,
    ):
        worker.store(*range(100))
        before = await router.learns(w1=worker.keys)
        number = 100
        for host in ("router", "worker", "redis"):
            for seconds in (HOUR_S, -HOUR_S, 0):
                clocks[host].set(seconds)
                worker.store(number)
                number += 1
                known = await router.learns(w1=worker.keys)
                assert known.leases_ended == 0
                if host == "redis":
                    assert abs((await redis.time())[0] - time.time() - seconds) < 60
                else:
                    assert known.resyncs == before.resyncs
                if host == "router":
                    assert abs(known.wall - time.time() - seconds) < 60


async def test_a_worker_that_dies_as_the_clock_of_redis_is_set_back_stays_away(
    server: EmbeddedRedis, clocks: dict[str, HostClock]
) -> None:
    """Its record lies an hour ahead then, and is read again and again."""
    clocks["redis"].set(HOUR_S)
    async with lone_router(server.url) as router:
        async with lone_worker(server.url) as worker:
            worker.store(1, 2, 3)
            await router.learns(w1=worker.keys)
        clocks["redis"].set(0)
        async with asyncio.timeout(20):
            while (await router.knowledge(time.monotonic() - 0.1)).held:
                pass
        end = time.monotonic() + 1.5 * LONE_LEASE_S
        while (known := await router.knowledge()).at < end:
            assert known.held == {}
        assert known.leases_ended == 1
