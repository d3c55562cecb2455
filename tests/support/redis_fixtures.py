"""Real Redis servers for tests, and a TCP proxy in front of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvhive.scripts.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server for one test module; each test finds it empty by asking for `index_redis`."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis") / "server") as server:
        yield server


@pytest.fixture
async def index_redis(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client of an emptied server."""
    async with connect(redis_server.url) as client:
        await client.flushall()
        yield client


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server that this test may kill, stop and restart."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis") / "server")
    server.start()
    yield server
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)
    server.stop()


def connect(url: str, timeout_s: float = 1.0) -> Redis:
    """A client that fails fast, as the product's do."""
    return Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
    )


def kill(server: EmbeddedRedis) -> None:
    """SIGKILL a server and wait until it is gone."""
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def restart_full(url: str, bytes_over: int) -> None:
    """Set a memory limit that lies `bytes_over` above what is in use."""
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + bytes_over)


async def eventually(check: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Wait until `check` holds; a failing one fails the test with its name."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = check()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {check}"
        await asyncio.sleep(0.01)


class SlowProxy:
    """Forwards one TCP port to a server, delaying every answer by `delay_s`. An async context manager."""

    def __init__(self, url: str, delay_s: float) -> None:
        self._upstream = urlsplit(url)
        self.delay_s = delay_s
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SlowProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://:{self._upstream.password}@127.0.0.1:{port}/0"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        for source, sink, delay in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, delay))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if delay:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        sink.close()
