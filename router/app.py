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
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvhive.proto.block_hash import root_hash
from kvhive.proto.config import ClusterConfig
from kvhive.proto.index_schema import IndexKeys
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.cluster_view import ClusterView
from kvhive.router.dispatcher import Dispatcher, DispatchLimits
from kvhive.router.frontend import ModelInfo
from kvhive.router.grpc_service import REQUEST_TYPES, InferenceService
from kvhive.router.http_gateway import HttpServer
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.malformed_message import MalformedMessageGuard
from kvhive.router.metrics import RequestMetrics
from kvhive.router.openai_api import create_app
from kvhive.router.placement import Placer, RoutingState
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PromptPreparer
from kvhive.router.redis_connection import open_redis
from kvhive.router.routing_policy import KvAwarePolicy
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import GrpcWorkerClient
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry

log = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
STOP_GRACE_S = 2.0
HOUSEKEEPING_S = 0.25
_SERVICE = "kvhive.v1.Inference"

# Clients may ping idle and silent streams: a long prefill is not a broken connection.
_KEEPALIVE_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything a router needs to know."""

    config: ClusterConfig
    redis_url: str
    cluster_token: str
    model_path: Path
    model_name: str
    model_identity: bytes
    max_context: int
    vocab_size: int
    version: str


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where a router listens."""

    grpc: str
    """host:port of kvhive.v1.Inference."""
    http: str
    """Base URL of the HTTP API."""


async def run_router(
    options: RouterOptions, ready: Callable[[RouterEndpoints], None], stop: asyncio.Event
) -> None:
    """Serve until `stop` is set; `ready` is called once both doors are open."""
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        tokenizer = await asyncio.get_running_loop().run_in_executor(executor, _load_tokenizer, options)
        state, view = await stack.enter_async_context(_routing_state(options))
        workers = GrpcWorkerClient(options.cluster_token)
        stack.push_async_callback(workers.close)
        metrics = RequestMetrics()
        dispatcher = _dispatcher(options, tokenizer, executor, state, workers, metrics)
        http = HttpServer(create_app(dispatcher, metrics.registry, options.config.router.max_request_bytes))
        server, health_service = _grpc_server(options, dispatcher, view)
        router = options.config.router
        grpc_port = server.add_insecure_port(f"{router.host}:{router.grpc_port}")
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        http_port = await http.start(router.host, router.http_port)
        stack.push_async_callback(http.stop, STOP_GRACE_S)
        housekeeper = asyncio.create_task(_keep_house(health_service, state.registry, workers))
        stack.callback(housekeeper.cancel)
        ready(RouterEndpoints(f"{router.host}:{grpc_port}", f"http://{router.host}:{http_port}"))
        await stop.wait()


@asynccontextmanager
async def _routing_state(options: RouterOptions) -> AsyncIterator[tuple[RoutingState, ClusterView]]:
    """Open what routing reads, and keep it fed from Redis until the end."""
    config = options.config
    client = open_redis(options.redis_url, config.redis.timeout_s)
    spec = ModelSpec(options.model_identity.hex(), config.workers.block_size)
    keys = IndexKeys(config.cluster)
    registry = WorkerRegistry(
        client, keys, spec, lease_s=config.redis.lease_s, cooldown_s=config.router.failure_cooldown_s
    )
    mirror = KvIndexMirror()
    reader = KvIndexReader(client, keys, registry, mirror)
    predicted, loads = PredictedBlocks(config.router.predicted_ttl_s), LoadTracker()
    reader.on_stored.append(predicted.forget)
    registry.on_join.append(lambda record: predicted.drop(record.worker_id))  # an epoch begins empty
    registry.on_leave.extend([predicted.drop, loads.drop])
    view = ClusterView(
        config.cluster, options.model_name, options.version, registry, mirror, reader, time.monotonic
    )
    tasks = [asyncio.create_task(registry.run()), asyncio.create_task(reader.run())]
    try:
        yield RoutingState(registry, mirror, predicted, loads), view
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()


def _dispatcher(
    options: RouterOptions,
    tokenizer: TextTokenizer,
    executor: ThreadPoolExecutor,
    state: RoutingState,
    workers: GrpcWorkerClient,
    metrics: RequestMetrics,
) -> Dispatcher:
    config = options.config
    root = root_hash(options.model_identity, config.cache_salt.encode())
    block_size = config.workers.block_size
    placer = Placer(state, KvAwarePolicy(), block_size, config.router.index_stale_after_s, time.monotonic)
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
    )
    preparer = PromptPreparer(tokenizer, root, block_size, executor)
    return Dispatcher(model, (tokenizer, preparer), (state, placer), workers, limits, metrics, time.monotonic)


def _grpc_server(
    options: RouterOptions, dispatcher: Dispatcher, view: ClusterView
) -> tuple[grpc.aio.Server, health_aio.HealthServicer]:
    limit = options.config.router.max_request_bytes
    server = grpc.aio.server(
        options=[*_KEEPALIVE_OPTIONS, ("grpc.max_receive_message_length", limit)],
        interceptors=[MalformedMessageGuard(REQUEST_TYPES)],
    )
    service = InferenceService(dispatcher, view.describe)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health_service = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, health_service


async def _keep_house(
    service: health_aio.HealthServicer, registry: WorkerRegistry, workers: GrpcWorkerClient
) -> None:
    """Keep grpc.health.v1, and the channels to workers, in step with who serves."""
    last = None
    while True:
        serving = bool(registry.routable(time.monotonic()))
        now = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        if now != last:
            await service.set(_SERVICE, now)
            await service.set("", now)
            last = now
        await workers.retain({view.record.address for view in registry.views()})
        await asyncio.sleep(HOUSEKEEPING_S)


def _load_tokenizer(options: RouterOptions) -> TextTokenizer:
    timeout_s = options.config.router.template_timeout_s
    return TextTokenizer.load(options.model_path, timeout_s, max_tokens=options.max_context - 1)
