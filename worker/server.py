"""One worker process put together: model, pool, engine thread, gRPC service and event publisher.

Knows nothing of Ray: `actor.py` wraps it, tests run it directly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch
from redis.asyncio import Redis

from kvhive.proto.block_chain import chain_hash
from kvhive.proto.block_hash import root_hash
from kvhive.proto.config import bracketed
from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import IndexKeys, LoadReport, WorkerRecord, WorkerState
from kvhive.proto.kv_events import KvEvent
from kvhive.proto.transport import MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2_grpc
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks
from kvhive.worker.grammar_desk import GrammarDesk
from kvhive.worker.index_connection import open_index
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.kv_event_publisher import KvEventPublisher
from kvhive.worker.kv_transfer import KvTransfer, TransferAddress
from kvhive.worker.model_identity import model_identity
from kvhive.worker.model_runner import ModelRunner
from kvhive.worker.options import WorkerOptions
from kvhive.worker.pins import PinBudget
from kvhive.worker.rank_leader import RankLeader, RankProcesses
from kvhive.worker.runner_loader import load_worker_runner, set_threads
from kvhive.worker.scheduler import DraftsFor, Scheduler, SchedulerLimits
from kvhive.worker.service import ClusterTokenGuard, WorkerService
from kvhive.worker.speculation import make_drafter
from kvhive.worker.speculation_control import SpeculationControl
from kvhive.worker.speculative_runner import SpeculativeRunner
from kvhive.worker.transfer_identity import TransferIdentity
from kvhive.worker.transfer_party import Emulation

log = logging.getLogger(__name__)
T = TypeVar("T")

CALIBRATION_TOKENS = (16, 64, 256)
START_STEP_TIMEOUT_S = 60.0

# A hung peer is found by HTTP/2 pings in about a second, and a silent minute of prefill is not a hang:
# the server accepts pings at any rate, on idle channels too.
GRPC_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
    ("grpc.http2.max_ping_strikes", 0),
]


class WorkerServer:
    """Starts, serves and stops one worker. `start` and `stop` block; call them from one thread."""

    def __init__(
        self,
        options: WorkerOptions,
        on_failure: Callable[[], None] = lambda: None,
        ranks: RankProcesses | None = None,
    ) -> None:
        """Make a server; `ranks` are the others of a worker that options.tensor_parallel ranks share."""
        self._options = options
        self._on_failure = on_failure
        self._leader = None if ranks is None else RankLeader(ranks, on_failure)
        load = options.load_vocabulary
        self._grammars = GrammarDesk(None if load is None else partial(load, options.model_path))
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._engine: Engine | None = None
        self._engine_thread: threading.Thread | None = None
        self._service: WorkerService | None = None
        self._grpc: grpc.aio.Server | None = None
        self._publisher: KvEventPublisher | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._redis: Redis | None = None
        self._pool: torch.Tensor | None = None
        self._transfer: KvTransfer | None = None
        self._progress = "starting"
        self._stopped = False
        self.address = ""

    def progress(self) -> str:
        """Say what is being done now, for people."""
        return self._progress

    @property
    def epoch(self) -> int:
        """The epoch under which this worker is registered; 0 before."""
        return self._publisher.epoch if self._publisher else 0

    def start(self) -> None:
        """Load the model, calibrate, open the service and register. Returns when it serves, or warms up.

        Raises ModelError when the model or the pool cannot be loaded.
        """
        options = self._options
        self._loop_thread.start()
        self._progress = "loading model"
        vocabulary = self._grammars.load()
        set_threads(options.threads)
        target = load_worker_runner(options) if self._leader is None else self._leader.load(options)
        identity = model_identity(
            Path(options.model_path), target.dtype_name, options.block_size, options.kv_dtype
        )
        self._pool = target.pool
        vocabulary.result()  # what is measured next would be slower beside it
        runner, drafts_for = self._speculating(target, target.num_blocks)
        self._service = self._call(self._make_service(runner))
        engine = self._engine = self._make_engine(runner, target.num_blocks, identity, drafts_for)
        self._progress = "calibrating"
        engine.calibrate(CALIBRATION_TOKENS)
        self._progress = "registering"
        self._call(self._open(runner, engine, identity))
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._engine_thread.start()
        self._call(self._serve())

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, deregister and end. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._loop_thread.is_alive():
            try:
                asyncio.run_coroutine_threadsafe(self._close(grace_s), self._loop).result(grace_s + 30)
            finally:
                if self._leader is not None:
                    self._leader.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(5)
        if not self._loop.is_running():
            self._loop.close()
        self._grammars.close()
        self._progress = "stopped"

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_STEP_TIMEOUT_S)

    def _speculating(self, target: ModelRunner, num_blocks: int) -> tuple[ModelRunner, DraftsFor | None]:
        """Return the runner to use, and how many drafts to try for a sequence."""
        drafter = make_drafter(self._options, target.shape, num_blocks)
        if drafter is None:
            return target, None
        runner = SpeculativeRunner(target, drafter, time.monotonic)
        control = SpeculationControl(self._options.speculation.max_drafts, lambda: runner.costs)
        return runner, control.drafts_for

    async def _make_service(self, runner: ModelRunner) -> WorkerService:
        return WorkerService(self._options.worker_id, runner.shape, self._grammars)

    def _make_engine(
        self, runner: ModelRunner, num_blocks: int, identity: bytes, drafts_for: DraftsFor | None
    ) -> Engine:
        options = self._options
        assert self._service is not None
        root = root_hash(identity, options.cluster_salt.encode())
        chain_hash()  # perhaps it must be built: now, and not while the first request waits
        pool = BlockPool(num_blocks, PinBudget(options.pin_share, options.pin_tenant_share))
        manager = KvCacheManager(pool, options.block_size, root, time.monotonic)
        limits = SchedulerLimits(options.max_step_tokens, options.max_running, options.max_waiting)
        hooks = EngineHooks(self._service.deliver, self._publish)
        return Engine(runner, Scheduler(manager, limits, drafts_for), hooks, time.monotonic)

    def _publish(self, events: Iterable[KvEvent]) -> None:
        assert self._publisher is not None
        self._publisher.add(events)

    async def _open(self, runner: ModelRunner, engine: Engine, identity: bytes) -> None:
        options = self._options
        assert self._service is not None
        guard = ClusterTokenGuard(options.cluster_token)
        self._grpc = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[guard])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._grpc)
        host = bracketed(options.host)
        port = self._grpc.add_insecure_port(f"{host}:0")
        await self._service.door.open(host)
        await self._grpc.start()
        self.address = f"{host}:{port}"
        if options.transfer.enabled and options.tensor_parallel == 1:  # else each rank has a part of a block
            self._transfer = self._make_transfer(engine, identity)
        self._service.attach(engine, lambda: self.epoch, self._transfer, self._tell_state)
        self._redis = open_index(options.redis_url, options.redis_timeout_s)
        record = WorkerRecord(
            worker_id=options.worker_id,
            address=self.address,
            epoch=0,
            model=options.model_name,
            model_identity=identity.hex(),
            block_size=options.block_size,
            max_context=runner.shape.max_context,
            vocab_size=runner.shape.vocab_size,
            state=WorkerState.STARTING,
            device=runner.device,
            pid=os.getpid(),
        )
        self._publisher = KvEventPublisher(
            self._redis,
            IndexKeys(options.cluster),
            record,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            load=self._load,
        )

    def _make_transfer(self, engine: Engine, identity: bytes) -> KvTransfer:
        options, pool = self._options, self._pool
        assert pool is not None
        kind = TransferIdentity(
            model=identity.hex(),
            namespace=root_hash(identity, options.cluster_salt.encode()).hex(),
            kv_dtype=str(pool.dtype),
            layout=str(tuple(pool.shape[1:])),
            block_size=options.block_size,
            tp=options.tensor_parallel,
        )
        transfer = KvTransfer(
            TransferAddress(options.worker_id, self.address, lambda: self.epoch),
            pool,
            kind,
            engine.desk,
            options.transfer,
            options.cluster_token,
            Emulation(options.emulated_bytes_per_s, options.emulated_delay_s),
        )
        # A draft model would guess from blocks that it never saw.
        transfer.open(pulling=options.speculation.mode != "draft")
        return transfer

    def _load(self) -> LoadReport:
        assert self._engine is not None
        return self._engine.load

    async def _serve(self) -> None:
        assert self._service is not None and self._publisher is not None
        self._publishing = asyncio.create_task(self._publisher.run())
        self._publishing.add_done_callback(self._publisher_ended)
        # Where nobody warms it in time, it serves with a cold cache.
        warms = self._options.warm_s > 0 and self._transfer is not None
        await self._service.change_state(WorkerState.WARMING if warms else WorkerState.SERVING)
        if warms:
            self._warming = asyncio.create_task(self._end_warming(self._service))

    async def _end_warming(self, service: WorkerService) -> None:
        await asyncio.sleep(self._options.warm_s)
        if service.state is WorkerState.WARMING:
            log.warning("nobody ended the warming worker_id=%s", self._options.worker_id)
            await service.change_state(WorkerState.SERVING)

    async def _tell_state(self, state: WorkerState) -> None:
        self._progress = state.value
        if self._publisher is not None:
            await self._publisher.set_state(state)

    async def _close(self, grace_s: float) -> None:
        if self._warming is not None:
            self._warming.cancel()
        if self._service is not None:
            await self._service.close_doors()
            await self._service.wait_idle(grace_s)
        if self._transfer is not None:
            await self._transfer.close()
        if self._engine is not None:
            self._engine.stop()
        if self._engine_thread is not None:
            await asyncio.to_thread(self._engine_thread.join, 10)
        if self._publisher is not None:
            await self._publisher.close()
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        if self._grpc is not None:
            if self._service is not None:
                self._service.door.close()
            await self._grpc.stop(1.0)
        if self._redis is not None:
            await self._redis.aclose()

    def _publisher_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # Without a publisher the lease ends and nobody would know why: better a fresh process.
            log.critical("publisher failed worker_id=%s", self._options.worker_id, exc_info=task.exception())
            self._on_failure()

    def _run_engine(self) -> None:
        assert self._engine is not None
        try:
            self._engine.run()
        except Exception:  # the thread's last line: whatever it was, the pool's content is not known now
            log.exception("engine failed, the worker gives up worker_id=%s", self._options.worker_id)
            assert self._service is not None
            self._service.state = WorkerState.STOPPED
            try:
                self._engine.abandon(Unavailable("the worker's engine failed"))
            finally:
                self._on_failure()
