"""A cluster without Ray, torch and doors: workers on simulated models, a real index, a dispatcher."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from frail_workers import FrailWorkers
from redis_fixtures import connect, eventually
from worker_rig import TOKEN, WorkerRig, running_worker

from kvhive.proto.block_hash import root_hash
from kvhive.proto.config import TransferConfig
from kvhive.proto.index_schema import IndexKeys, WorkerRecord, WorkerState
from kvhive.router.dispatcher import Dispatcher, DispatchLimits
from kvhive.router.frontend import Delta, Finished, ModelInfo, Started, TokenLogprobs, Usage
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import Placer, RoutingState
from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PromptPreparer
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import GrpcWorkerClient
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry
from kvhive.worker.kv_event_publisher import KvEventPublisher
from kvhive.worker.model_runner import ModelRunner

IDENTITY = b"simulated model"
BLOCK = 4
VOCABULARY = 1000
CONTEXT = 8192


@dataclass
class Answer:
    """Everything one choice brought."""

    started: Started | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        assert self.finished is not None, "the generation did not finish"
        assert self.finished.usage is not None, "it was not the last one to finish"
        return self.finished.usage


@dataclass
class RouterRig:
    """A dispatcher over running workers."""

    dispatcher: Dispatcher
    workers: dict[str, WorkerRig]
    publishers: dict[str, KvEventPublisher]
    registry: WorkerRegistry
    mirror: KvIndexMirror
    state: RoutingState
    frail: FrailWorkers

    async def ask(self, tokens: list[int], max_tokens: int = 4, **fields: object) -> Answer:
        sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        request = GenerateRequest(TokenPrompt(tuple(tokens)), sampling, **fields)  # type: ignore[arg-type]
        return await self.run(request)

    async def run(self, request: GenerateRequest, begun: asyncio.Event | None = None) -> Answer:
        """Run a request of one choice."""
        (answer,) = await self.run_all(request, begun)
        return answer

    async def run_all(self, request: GenerateRequest, begun: asyncio.Event | None = None) -> list[Answer]:
        """Run a request and return its choices; sets `begun` when each of them has output."""
        answers = [Answer() for _ in range(request.n)]
        async with aclosing(self.dispatcher.generate(request)) as events:
            async for event in events:
                match event:
                    case Started():
                        for answer in answers:
                            answer.started = event
                    case Delta():
                        answer = answers[event.choice]
                        assert answer.finished is None, "news of a choice that has ended"
                        answer.text += event.text
                        answer.token_ids.extend(event.token_ids)
                        answer.logprobs.extend(event.logprobs)
                        answer.prompt_logprobs.extend(event.prompt_logprobs)
                        if begun is not None and all(answer.token_ids for answer in answers):
                            begun.set()
                    case Finished():
                        answers[event.choice].finished = event
        return answers

    def oracle(self, tokens: list[int], length: int, choice: int = 0) -> list[int]:
        """What any right worker generates."""
        return next(iter(self.workers.values())).oracle(tokens, length, choice)

    async def indexed(self) -> None:
        """Wait until the mirror holds what the pools hold."""

        def same() -> bool:
            return all(
                self.mirror.block_count(w) == len(rig.pool._by_hash) for w, rig in self.workers.items()
            )

        await eventually(same)

    async def idle(self) -> None:
        """Wait until no worker holds a live block."""
        for worker in self.workers.values():
            await worker.idle()


@asynccontextmanager
async def running_router(
    redis_url: str,
    demo_gguf: Path,
    count: int = 2,
    step_s: float = 0.0,
    blocks: int = 256,
    max_concurrent: int = 100,
    max_failovers: int = 2,
    max_waiting: int = 64,
    max_drafts: int = 0,
    vocab_size: int = VOCABULARY,
    transfer: TransferConfig | None = None,
    cooldown_s: float = 0.5,
    real: Callable[[], ModelRunner] | None = None,
    limits: Mapping[str, float] | None = None,
) -> AsyncIterator[RouterRig]:
    """Start workers and a router; leaves when all workers are routable.

    `real` makes a runner for each worker that computes, of a small vocabulary and context; `limits` are
    fields of DispatchLimits.
    """
    context = CONTEXT
    root, keys = root_hash(IDENTITY), IndexKeys("test")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(redis_url))
        await client.flushall()
        workers: dict[str, WorkerRig] = {}
        publishers: dict[str, KvEventPublisher] = {}
        for number in range(1, count + 1):
            runner = real() if real else None
            if runner is not None:
                vocab_size, context = runner.shape.vocab_size, runner.shape.max_context
            worker = await stack.enter_async_context(
                running_worker(
                    f"w{number}",
                    blocks,
                    BLOCK,
                    step_s,
                    root,
                    max_waiting,
                    max_drafts,
                    vocab_size,
                    transfer,
                    epoch=lambda number=number: publishers[f"w{number}"].epoch,  # type: ignore[misc]
                    real=runner,
                )
            )
            workers[worker.worker_id] = worker
            publishers[worker.worker_id] = await _publish(stack, redis_url, keys, worker)
        spec = ModelSpec(IDENTITY.hex(), BLOCK)
        registry = WorkerRegistry(client, keys, spec, lease_s=2.0, cooldown_s=cooldown_s, poll_s=0.05)
        mirror = KvIndexMirror()
        reader = KvIndexReader(client, keys, registry, mirror)
        predicted = PredictedBlocks(ttl_s=30.0)
        reader.on_stored.append(predicted.forget)
        state = RoutingState(registry, mirror, predicted, LoadTracker())
        for loop in (registry.run(), reader.run()):
            stack.push_async_callback(_end, asyncio.create_task(loop))
        executor = stack.enter_context(ThreadPoolExecutor(1))
        tokenizer = TextTokenizer.load(demo_gguf)
        worker_client = GrpcWorkerClient(TOKEN)
        stack.push_async_callback(worker_client.close)
        frail = FrailWorkers(worker_client)
        dispatcher = Dispatcher(
            ModelInfo("demo", context, vocab_size),
            (tokenizer, PromptPreparer(tokenizer, root, BLOCK, executor)),
            (state, Placer(state, KvAwarePolicy(), BLOCK, 5.0, time.monotonic)),
            frail,
            DispatchLimits(max_concurrent, max_failovers, **{"queue_timeout_s": 300.0, **(limits or {})}),  # type: ignore[arg-type]
            time.monotonic,
        )
        await eventually(lambda: len(registry.routable(time.monotonic())) == count)
        yield RouterRig(dispatcher, workers, publishers, registry, mirror, state, frail)


async def _publish(
    stack: AsyncExitStack, redis_url: str, keys: IndexKeys, worker: WorkerRig
) -> KvEventPublisher:
    client = await stack.enter_async_context(connect(redis_url))
    shape = worker.runner.shape
    record = WorkerRecord(
        worker_id=worker.worker_id,
        address=worker.address,
        epoch=0,
        model="demo",
        model_identity=IDENTITY.hex(),
        block_size=BLOCK,
        max_context=shape.max_context,
        vocab_size=shape.vocab_size,
        state=WorkerState.SERVING,
        device="simulated",
        pid=os.getpid(),
    )
    publisher = KvEventPublisher(
        client, keys, record, lease_s=2.0, heartbeat_s=0.1, load=lambda: worker.engine.load
    )
    worker.on_events(publisher.add)
    stack.push_async_callback(_end, asyncio.create_task(publisher.run()))
    return publisher


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a loop and wait for it, so that its connection is closed on the loop that opened it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
