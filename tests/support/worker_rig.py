"""A whole worker but for its model: engine thread, real gRPC service on loopback, simulated runner."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import torch
from grammar_vocabulary import TINY
from speculation_rig import ScriptedDrafter

from kvhive.proto.block_hash import BlockHash, pack_tokens, root_hash
from kvhive.proto.config import TransferConfig
from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import WorkerState
from kvhive.proto.kv_events import KvEvent
from kvhive.proto.token_vocabulary import TokenVocabulary
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks
from kvhive.worker.grammar_desk import GrammarDesk
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.kv_transfer import KvTransfer, TransferAddress
from kvhive.worker.model_runner import ModelRunner
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.service import ClusterTokenGuard, WorkerService
from kvhive.worker.simulated_runner import SimulatedRunner
from kvhive.worker.speculative_runner import SpeculativeRunner
from kvhive.worker.transfer_identity import TransferIdentity
from kvhive.worker.transfer_party import Emulation

TOKEN = "a cluster token"
ROOT = root_hash(b"a model")
METADATA = ((CLUSTER_TOKEN_KEY, TOKEN),)
IDENTITY = TransferIdentity("a model", ROOT.hex(), "int32", "(4,)", 4)


def simulated_pool(runner: SimulatedRunner, blocks: int, block_size: int) -> torch.Tensor:
    """The simulated runner's memory as the tensor that transfers know: a wrong block changes the output."""
    return torch.frombuffer(runner._slots, dtype=torch.int32).view(blocks, block_size)


@dataclass
class WorkerRig:
    """A running worker and a stub to it."""

    worker_id: str
    address: str
    server: grpc.aio.Server
    service: WorkerService
    engine: Engine
    pool: BlockPool
    thread: threading.Thread
    runner: SimulatedRunner
    channel: grpc.aio.Channel
    events: list[KvEvent] = field(default_factory=list)
    listeners: list[Callable[[Iterable[KvEvent]], None]] = field(default_factory=list)
    transfer: KvTransfer | None = None

    def on_events(self, listener: Callable[[Iterable[KvEvent]], None]) -> None:
        """Hear of every block event, in the engine's thread."""
        self.listeners.append(listener)

    @property
    def stub(self) -> worker_pb2_grpc.WorkerStub:
        return worker_pb2_grpc.WorkerStub(self.channel)

    def request(
        self,
        request_id: str,
        tokens: Iterable[int],
        max_tokens: int = 4,
        sampling: worker_pb2.WorkerSampling | None = None,
        **fields: object,
    ) -> worker_pb2.WorkerGenerateRequest:
        """A greedy request of one choice; `sampling` and `fields` change what they set."""
        whole = worker_pb2.WorkerSampling(
            max_tokens=max_tokens, top_p=1, typical_p=1, repetition_penalty=1, speculate=True
        )
        if sampling is not None:
            whole.MergeFrom(sampling)
        return worker_pb2.WorkerGenerateRequest(
            worker_id=self.worker_id,
            request_id=request_id,
            token_ids=pack_tokens(tokens),
            sampling=whole,
            **{"n": 1, **fields},
        )

    def oracle(self, tokens: Iterable[int], length: int, choice: int = 0) -> list[int]:
        """What a right worker generates for one choice."""
        sequence, sampling = list(tokens), SamplingParams(length, choice=choice)
        prompt = len(sequence)
        for _ in range(length):
            sequence.append(self.runner.next_token(sequence, sampling, prompt))
        return sequence[prompt:]

    async def generate(
        self, request: worker_pb2.WorkerGenerateRequest
    ) -> list[worker_pb2.WorkerGenerateResponse]:
        return [r async for r in self.stub.Generate(request, metadata=METADATA)]

    async def idle(self, within_s: float = 3.0) -> None:
        """Wait until no block is live; fail when it takes longer."""
        deadline = time.monotonic() + within_s
        while self.engine.load.blocks_live or self.engine.load.waiting or self.service.open_streams:
            assert time.monotonic() < deadline, f"still busy: {self.engine.load}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_worker(
    worker_id: str = "w1",
    blocks: int = 256,
    block_size: int = 4,
    step_s: float = 0.0,
    root: BlockHash = ROOT,
    max_waiting: int = 64,
    max_drafts: int = 0,
    vocab_size: int = 1000,
    transfer: TransferConfig | None = None,
    emulation: Emulation | None = None,
    identity: TransferIdentity = IDENTITY,
    epoch: Callable[[], int] = lambda: 1,
    real: ModelRunner | None = None,
    vocabulary: Callable[[], TokenVocabulary] = lambda: TINY,
) -> AsyncIterator[WorkerRig]:
    """Start a worker on a free loopback port and stop it at the end.

    With `max_drafts` it speculates, and every other draft is wrong. `real` computes instead of pretending.
    `vocabulary` is what it loads to follow grammars.
    """
    pool = BlockPool(blocks)
    manager = KvCacheManager(pool, block_size, root, time.monotonic)
    runner = SimulatedRunner(blocks, block_size, vocab_size, on_step=lambda tokens, pairs: time.sleep(step_s))
    drafter = ScriptedDrafter(runner.next_token, lambda length, index: index % 2 == 0)
    grammars = GrammarDesk(vocabulary)
    service = WorkerService(worker_id, (real or runner).shape, grammars)
    events: list[KvEvent] = []
    listeners: list[Callable[[Iterable[KvEvent]], None]] = []

    def publish(new: Iterable[KvEvent]) -> None:
        events.extend(new)
        for listener in listeners:
            listener(new)

    scheduler = Scheduler(
        manager, SchedulerLimits(64, 8, max_waiting), lambda seq: max_drafts if seq.sampling.speculate else 0
    )
    speculating = SpeculativeRunner(runner, drafter, time.monotonic)
    engine = Engine(
        real or (speculating if max_drafts else runner),
        scheduler,
        EngineHooks(service.deliver, publish),
        time.monotonic,
    )
    service.state = WorkerState.SERVING
    engine.calibrate((16, 64))  # as a real worker does: one that was never timed looks as if it cost nothing
    thread = threading.Thread(target=_run, args=(engine, service), daemon=True)
    thread.start()
    # Routers ping silent streams every second, which is no reason to hang up on them.
    options = [("grpc.http2.min_ping_interval_without_data_ms", 500), ("grpc.http2.max_ping_strikes", 0)]
    server = grpc.aio.server(interceptors=[ClusterTokenGuard(TOKEN)], options=options)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await service.door.open("127.0.0.1")
    await server.start()
    moving = None
    if transfer is not None:
        where = TransferAddress(worker_id, address, epoch)
        pool_tensor = simulated_pool(runner, blocks, block_size)
        moving = KvTransfer(where, pool_tensor, identity, engine.desk, transfer, TOKEN, emulation)
        moving.open()
    service.attach(engine, epoch, moving)
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield WorkerRig(
                worker_id,
                address,
                server,
                service,
                engine,
                pool,
                thread,
                runner,
                channel,
                events,
                listeners,
                moving,
            )
        finally:
            if moving is not None:
                await moving.close()
            engine.stop()
            await asyncio.to_thread(thread.join, 5)
            service.door.close()
            await server.stop(0)
            grammars.close()


def _run(engine: Engine, service: WorkerService) -> None:
    """What WorkerServer does around the engine, without ending the process."""
    try:
        engine.run()
    except RuntimeError:
        service.state = WorkerState.STOPPED
        with contextlib.suppress(TypeError):  # of a pool that a test has broken
            engine.abandon(Unavailable("the worker's engine failed"))
