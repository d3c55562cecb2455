"""Workers without a model for `kvhive bench proxy`: the real service and engine, tokens at a fixed pace.

    python -m kvhive.scripts.bench_proxy_worker <worker.json>

It runs until its standard input ends, which it does when whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

from kvhive.proto.block_hash import root_hash
from kvhive.proto.index_schema import IndexKeys, WorkerRecord, WorkerState
from kvhive.proto.v1 import worker_pb2_grpc
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks
from kvhive.worker.index_connection import open_index
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.kv_event_publisher import KvEventPublisher
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.server import GRPC_OPTIONS
from kvhive.worker.service import ClusterTokenGuard, WorkerService
from kvhive.worker.simulated_runner import SimulatedRunner

BLOCK_SIZE = 16
MAX_CONTEXT = 8192
POOL_BLOCKS = 16_384
IDENTITY = b"no model"
LEASE_S = 30.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class StubSpec:
    """What the process is told."""

    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    workers: int
    step_s: float
    """From one token of a stream to its next; 0 is as fast as the engine goes."""
    vocab_size: int
    ready_file: str
    """Gets the address of each worker by its id, once all serve."""
    max_context: int = MAX_CONTEXT
    simulated: bool = False
    """Whether tokens and log-probabilities are made up from the prompt, as fast as that goes."""

    def save(self, path: Path) -> None:
        """Write it for this user only."""
        path.touch(0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> StubSpec:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


class PacedRunner:
    """A ModelRunner that computes nothing: a step ends at the next tick, with the next number as token."""

    device = "none"
    overlaps = False

    def __init__(self, step_s: float, vocab_size: int, max_context: int) -> None:
        self.shape = ModelShape(vocab_size, max_context, 1, 1, 1, 4)
        self._step_s = step_s
        self._due = 0.0

    def launch(self, chunks: Sequence[Chunk]) -> Callable[[], list[ChunkResult]]:
        """See ModelRunner."""
        return lambda: self.run(chunks)

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """See ModelRunner. Prompts take no time; a step that decodes waits for its tick."""
        if self._step_s and any(len(chunk.token_ids) == 1 for chunk in chunks):
            now = time.monotonic()
            self._due = max(now, self._due + self._step_s)
            time.sleep(self._due - now)
        return [ChunkResult((self._token(chunk),) if chunk.sampling else ()) for chunk in chunks]

    def _token(self, chunk: Chunk) -> int:
        return 1000 + (chunk.start + len(chunk.token_ids)) % (self.shape.vocab_size - 1000)


class HealthyRunner(SimulatedRunner):
    """No token of its vocabulary is poison."""

    POISON = 2**31


async def _serve_one(spec: StubSpec, number: int, stack: contextlib.AsyncExitStack) -> tuple[str, str]:
    """Start one worker; return its id and address."""
    worker_id = f"stub{number}"
    runner: PacedRunner | HealthyRunner = PacedRunner(spec.step_s, spec.vocab_size, spec.max_context)
    if spec.simulated:
        runner = HealthyRunner(POOL_BLOCKS, BLOCK_SIZE, spec.vocab_size, spec.max_context)
    manager = KvCacheManager(BlockPool(POOL_BLOCKS), BLOCK_SIZE, root_hash(IDENTITY), time.monotonic)
    service = WorkerService(worker_id, runner.shape)
    redis = open_index(spec.redis_url, 2.0)
    stack.push_async_callback(redis.aclose)
    server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[ClusterTokenGuard(spec.cluster_token)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    record = WorkerRecord(
        worker_id=worker_id,
        address=address,
        epoch=0,
        model="stub",
        model_identity=IDENTITY.hex(),
        block_size=BLOCK_SIZE,
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        state=WorkerState.SERVING,
        device=runner.device,
        pid=os.getpid(),
    )
    publisher = KvEventPublisher(
        redis, IndexKeys("bench"), record, LEASE_S, heartbeat_s=0.5, load=lambda: engine.load
    )
    limits = SchedulerLimits(spec.max_context, 64, 1024)
    hooks = EngineHooks(service.deliver, publisher.add)
    engine = Engine(runner, Scheduler(manager, limits), hooks, time.monotonic)
    engine.calibrate((16, 64, 256))
    service.attach(engine, lambda: publisher.epoch)
    service.state = WorkerState.SERVING
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    await service.door.open("127.0.0.1")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    thread = threading.Thread(target=engine.run, name="engine", daemon=True)
    thread.start()
    publishing = asyncio.create_task(publisher.run())

    async def end() -> None:
        engine.stop()
        await asyncio.to_thread(thread.join, _STOP_S)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    stack.push_async_callback(end)
    return worker_id, address


async def serve(spec: StubSpec) -> None:
    """Serve until standard input ends."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = dict([await _serve_one(spec, number, stack) for number in range(spec.workers)])
        _announce(Path(spec.ready_file), addresses)
        await asyncio.to_thread(sys.stdin.read)


def _announce(path: Path, addresses: dict[str, str]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(addresses))
    fresh.rename(path)


if __name__ == "__main__":
    asyncio.run(serve(StubSpec.load(Path(sys.argv[1]))))
