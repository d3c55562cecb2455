"""A router's index and a worker's publisher as processes, which can be frozen and have clocks of their own.

Run as a program it is one of them: `router URL` prints what it knows, a line every 20 ms; `worker URL` stores
the numbers that it reads, a line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from index_rig import key, routing, stored, worker
from redis_fixtures import connect

PRINT_S = 0.02
LONE_LEASE_S = 2.0
"""Twenty heartbeats, for machines that are busy."""


@dataclass(frozen=True)
class Knowledge:
    """What a router knew at a moment."""

    at: float
    """Monotonic seconds, which all processes of a machine share."""
    wall: float
    """What it takes for the time of day."""
    held: dict[str, str]
    """Of each worker that may get requests, a digest of the keys that it is believed to hold."""
    staleness_s: float
    resyncs: int
    leases_ended: int


def digest_of(keys: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(keys))).hexdigest()


async def _router(url: str) -> None:
    async with connect(url) as redis, routing(redis, LONE_LEASE_S) as router:
        while True:
            known = Knowledge(
                time.monotonic(),
                time.time(),
                {
                    view.record.worker_id: digest_of(router.knows(view.record.worker_id))
                    for view in router.registry.routable(time.monotonic())
                },
                min(router.mirror.staleness_s(), 1e9),
                router.reader.counters.resyncs,
                router.registry.counters.leases_ended,
            )
            print(json.dumps(vars(known)), flush=True)
            await asyncio.sleep(PRINT_S)


async def _worker(url: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    async with connect(url) as redis, worker(redis, lease_s=LONE_LEASE_S) as w1:
        while line := await lines.readline():
            w1.add(stored(int(line)))


@dataclass
class LoneRouter:
    """A router process."""

    process: asyncio.subprocess.Process

    async def knowledge(self, since: float = 0.0) -> Knowledge:
        """The next line that was printed after a moment."""
        assert self.process.stdout is not None
        while True:
            known = Knowledge(**json.loads(await self.process.stdout.readline()))
            if known.at >= since:
                return known

    async def learns(self, **keys: Iterable[bytes]) -> Knowledge:
        """Wait until it knows exactly these workers, and each to hold exactly these."""
        held = {worker_id: digest_of(each) for worker_id, each in keys.items()}
        async with asyncio.timeout(20):
            while True:
                known = await self.knowledge(time.monotonic() - PRINT_S)
                if known.held == held and known.staleness_s < 5.0:
                    return known


@dataclass
class LoneWorker:
    """A worker process; `keys` is what it was told to hold."""

    process: asyncio.subprocess.Process
    keys: set[bytes]

    def store(self, *numbers: int) -> None:
        """Let it hold these."""
        assert self.process.stdin is not None
        self.keys |= {key(n) for n in numbers}
        self.process.stdin.write(b"".join(b"%d\n" % n for n in numbers))


@contextlib.asynccontextmanager
async def _running(
    role: str, url: str, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, role, url, stdin=pipe, stdout=pipe, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def lone_router(url: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[LoneRouter]:
    """Run a router's registry and mirror."""
    async with _running("router", url, environment or {}) as process:
        yield LoneRouter(process)


@contextlib.asynccontextmanager
async def lone_worker(url: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[LoneWorker]:
    """Run the publisher of w1."""
    async with _running("worker", url, environment or {}) as process:
        yield LoneWorker(process, set())


if __name__ == "__main__":
    asyncio.run({"router": _router, "worker": _worker}[sys.argv[1]](sys.argv[2]))
