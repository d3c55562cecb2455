"""A dispatcher over workers that are told what to do: real registry and placing, no network to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field

from placing_rig import BLOCK, IDLE
from redis.asyncio import Redis
from worker_records import KEYS, LEASE_S, SPEC, Clock, record, register

from kvhive.proto.block_hash import root_hash
from kvhive.proto.index_schema import LoadReport
from kvhive.proto.v1 import worker_pb2
from kvhive.router.dispatcher import Dispatcher, DispatchLimits
from kvhive.router.frontend import Finished, ModelInfo
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import Placer, RoutingState
from kvhive.router.policies import make_policy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PromptPreparer
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_registry import WorkerRegistry


@dataclass
class ScriptedWorkers:
    """A WorkerClient: each worker answers with one token, or raises what `errors` has for its address."""

    errors: dict[str, Exception] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, every answer waits."""
    requests: list[worker_pb2.WorkerGenerateRequest] = field(default_factory=list)

    async def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """See WorkerClient."""
        self.calls[request.worker_id] += 1
        self.requests.append(request)
        await self.open.wait()
        if request.worker_id in self.errors:
            raise self.errors[request.worker_id]
        message = worker_pb2.WorkerGenerateResponse(cached_tokens=0, written_tokens=0)
        message.updates.add(choice=0, token_ids=[300], finished=worker_pb2.WorkerFinished(stopped=False))
        yield message

    async def stop_choices(self, address: str, request_id: str, choices: Sequence[int]) -> None:
        """See WorkerClient."""


@dataclass
class ScriptedCluster:
    """Workers w1, w2, ... with leases that do not end, and the dispatcher in front of them."""

    workers: ScriptedWorkers
    dispatcher: Dispatcher
    state: RoutingState
    mirror: KvIndexMirror
    clock: Clock
    preparer: PromptPreparer
    redis: Redis

    async def join(self, worker_id: str, load: LoadReport = IDLE, epoch: int = 1) -> None:
        """Register a worker, or report another load of one, and let the router hear of it."""
        await register(self.redis, record(worker_id, epoch, load=load))
        await self.state.registry.poll()

    async def ask(self, tokens: Sequence[int], **fields: object) -> str:
        """Run a request of one token and return who answered."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = GenerateRequest(TokenPrompt(tuple(tokens)), sampling, **fields)  # type: ignore[arg-type]
        async with aclosing(self.dispatcher.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finished) and event.usage is not None:
                    return event.usage.worker_id
        raise AssertionError("the generation did not finish")

    async def warm(self, worker_id: str, tokens: Sequence[int]) -> None:
        """Let a worker hold a prompt."""
        prompt = await self.preparer.prepare(GenerateRequest(TokenPrompt(tuple(tokens))))
        self.mirror.replace(worker_id, prompt.keys)

    def routable(self) -> list[str]:
        """Who would get a request now."""
        return [view.record.worker_id for view in self.state.registry.routable(self.clock())]


async def scripted_cluster(
    redis: Redis,
    tokenizer: TextTokenizer,
    executor: ThreadPoolExecutor,
    count: int = 2,
    workers: ScriptedWorkers | None = None,
    **more: float,
) -> ScriptedCluster:
    """Register the workers, and put a router together that has heard of them; `more` are its limits."""
    clock = Clock()
    registry = WorkerRegistry(redis, KEYS, SPEC, LEASE_S, cooldown_s=5.0, clock=clock)
    for number in range(1, count + 1):
        await register(redis, record(f"w{number}", number, load=IDLE))
    await registry.poll()
    mirror = KvIndexMirror(clock)
    mirror.touch(clock())
    state = RoutingState(registry, mirror, PredictedBlocks(30.0), LoadTracker())
    placer = Placer(state, make_policy("kv_aware"), BLOCK, 1e9, clock)
    workers = workers or ScriptedWorkers()
    workers.open.set()
    preparer = PromptPreparer(tokenizer, root_hash(b"a model"), BLOCK, executor)
    bounds = {"max_concurrent": 100, "max_failovers": 2, "queue_timeout_s": 10.0, **more}
    limits = DispatchLimits(**bounds)  # type: ignore[arg-type]
    model = ModelInfo("demo", 2048, 49152)
    dispatcher = Dispatcher(model, (tokenizer, preparer), (state, placer), workers, limits, clock)
    return ScriptedCluster(workers, dispatcher, state, mirror, clock, preparer, redis)
