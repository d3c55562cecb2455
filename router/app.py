"""One router process put together: index, policy, dispatcher and the two doors.

Knows nothing of Ray or of a worker's inside; what only the composition root can know comes in RouterOptions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvhive.proto.block_chain import chain_hash
from kvhive.proto.block_hash import root_hash
from kvhive.proto.config import ClusterConfig
from kvhive.proto.index_schema import IndexKeys
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.cluster_view import ClusterView
from kvhive.router.dispatch_counters import DispatchCollector
from kvhive.router.dispatcher import Dispatcher, DispatchLimits
from kvhive.router.doors import Doors, RouterEndpoints
from kvhive.router.frontend import ModelInfo
from kvhive.router.grpc_service import InferenceService
from kvhive.router.http_app import create_app
from kvhive.router.kv_index_choice import IndexKind, KvIndexChoice
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.kv_index_redis import KvIndexRedis
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.metrics import MeteredFrontend, RequestMetrics
from kvhive.router.placement import Placer, RoutingState
from kvhive.router.policies import make_policy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PromptPreparer
from kvhive.router.pull_metrics import PullMetrics
from kvhive.router.redis_connection import open_redis
from kvhive.router.router_audit import RouterAudit
from kvhive.router.supervision import Supervisor
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import GrpcWorkerClient
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry

log = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
STOP_GRACE_S = 2.0
HOUSEKEEPING_S = 0.25


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything a router needs to know."""

    config: ClusterConfig
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    model_path: Path
    model_name: str
    model_identity: bytes
    max_context: int
    vocab_size: int
    version: str


async def run_router(
    options: RouterOptions,
    ready: Callable[[RouterEndpoints], None],
    stop: asyncio.Event,
    grace_s: Callable[[], float] = lambda: STOP_GRACE_S,
) -> None:
    """Serve until `stop` is set; `ready` is called once both doors are open.

    Then nothing new is accepted and what runs gets as long as `grace_s` answers. Raises RuntimeError when a
    loop that routing depends on has failed: a router on a frozen view is worse than none.
    """
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        loop = asyncio.get_running_loop()
        hashing = loop.run_in_executor(executor, chain_hash)  # which may have to be built first
        tokenizer = await loop.run_in_executor(executor, _load_tokenizer, options)
        log.info("block hashes by=%s", (await hashing).name)
        supervisor = await stack.enter_async_context(Supervisor(stop))
        state, view, mirror = await stack.enter_async_context(_routing_state(options, supervisor))
        workers = GrpcWorkerClient(options.cluster_token)
        stack.push_async_callback(workers.close)
        metrics = RequestMetrics()
        metrics.registry.register(PullMetrics(view.describe))
        dispatcher = _dispatcher(options, tokenizer, executor, state, workers)
        metrics.registry.register(
            DispatchCollector(dispatcher.counters, lambda: dispatcher.in_flight, lambda: dispatcher.held)
        )
        frontend = MeteredFrontend(dispatcher, metrics, time.monotonic)
        config = options.config.router
        app = create_app(frontend, metrics.registry, config.max_request_bytes, timed_out=metrics.timed_out)
        audit = RouterAudit(state.registry, mirror, state.loads, workers)
        service = InferenceService(frontend, lambda: _described(view, dispatcher), audit.take)
        doors = Doors(config, service, app)
        supervisor.start(_keep_house(doors, state.registry, workers))
        ready(await doors.open())
        await stop.wait()
        await doors.close(grace_s())
    if supervisor.failure is not None:
        raise RuntimeError("a loop of the router failed") from supervisor.failure


def _described(view: ClusterView, dispatcher: Dispatcher) -> pb.GetClusterResponse:
    """Describe the cluster, and this router."""
    response, counters = view.describe(), dispatcher.counters
    response.router.CopyFrom(
        pb.RouterInfo(
            first_tokens=counters.first_tokens,
            first_tokens_in_goal=counters.first_tokens_in_goal,
            in_flight=dispatcher.in_flight,
            held=dispatcher.held,
        )
    )
    return response


@asynccontextmanager
async def _routing_state(
    options: RouterOptions, supervisor: Supervisor
) -> AsyncIterator[tuple[RoutingState, ClusterView, KvIndexMirror]]:
    """Open what routing reads, and keep it fed from Redis until the end."""
    config = options.config
    client = open_redis(options.redis_url, config.redis.timeout_s)
    spec = ModelSpec(options.model_identity.hex(), config.workers.block_size)
    keys = IndexKeys(config.cluster)
    registry = WorkerRegistry(
        client, keys, spec, lease_s=config.redis.lease_s, cooldown_s=config.router.failure_cooldown_s
    )
    mirror, remote = KvIndexMirror(), KvIndexRedis(client, keys, registry)
    reader = KvIndexReader(client, keys, registry, mirror)
    kind = IndexKind(config.router.index)
    index = KvIndexChoice(kind, config.router.index_mirror_blocks, mirror, reader, remote)
    predicted, loads = PredictedBlocks(config.router.predicted_ttl_s), LoadTracker()
    for source in (reader, remote):
        source.on_stored.append(predicted.forget)
    registry.on_join.append(lambda record: predicted.drop(record.worker_id))  # an epoch begins empty
    registry.on_leave.extend([predicted.drop, loads.drop])
    view = ClusterView(
        config.cluster, options.model_name, options.version, registry, index, reader, time.monotonic
    )
    supervisor.start(registry.run())
    supervisor.start(index.run())
    async with client:
        yield RoutingState(registry, index, predicted, loads), view, mirror


def _dispatcher(
    options: RouterOptions,
    tokenizer: TextTokenizer,
    executor: ThreadPoolExecutor,
    state: RoutingState,
    workers: GrpcWorkerClient,
) -> Dispatcher:
    config = options.config
    root = root_hash(options.model_identity, config.cache_salt.encode())
    block_size = config.workers.block_size
    policy, stale_after_s = make_policy(config.router.policy), config.router.index_stale_after_s
    placer = Placer(state, policy, block_size, stale_after_s, time.monotonic)
    model = ModelInfo(
        name=options.model_name,
        max_context=options.max_context,
        vocab_size=options.vocab_size,
        identity=options.model_identity.hex(),
        created=int(time.time()),
    )
    limits = DispatchLimits(
        max_concurrent=config.router.max_concurrent_requests,
        max_failovers=config.router.max_failovers,
        queue_timeout_s=config.router.queue_timeout_s,
        max_predicted_ttft_s=config.router.max_predicted_ttft_s,
        max_held=config.autoscaling.hold_requests,
        hold_s=config.autoscaling.hold_s,
        ttft_goal_s=config.autoscaling.ttft_goal_s,
    )
    preparer = PromptPreparer(tokenizer, root, block_size, executor)
    return Dispatcher(
        model,
        (tokenizer, preparer),
        (state, placer),
        workers,
        limits,
        time.monotonic,
        config.router.tool_format,
    )


async def _keep_house(doors: Doors, registry: WorkerRegistry, workers: GrpcWorkerClient) -> None:
    """Keep health, and the channels to workers, in step with who serves."""
    while True:
        await doors.set_health(bool(registry.routable(time.monotonic())))
        await workers.retain({view.record.address for view in registry.views()})
        await asyncio.sleep(HOUSEKEEPING_S)


def _load_tokenizer(options: RouterOptions) -> TextTokenizer:
    timeout_s = options.config.router.template_timeout_s
    return TextTokenizer.load(options.model_path, timeout_s, max_tokens=options.max_context - 1)
