"""Both doors of a router, over real sockets, in front of a dispatcher over simulated workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
from prometheus_client import CollectorRegistry
from router_rig import RouterRig, running_router

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.grpc_service import InferenceService
from kvhive.router.http_app import create_app
from kvhive.router.http_gateway import HttpServer
from kvhive.router.metrics import MeteredFrontend, RequestMetrics

MODEL_VOCABULARY = 49152


@dataclass
class OpenDoors:
    """Clients of both doors, and what is behind them."""

    rig: RouterRig
    grpc: inference_pb2_grpc.InferenceStub
    openai: openai.AsyncOpenAI
    registry: CollectorRegistry


@contextlib.asynccontextmanager
async def open_doors(redis_url: str, demo_gguf: Path, **options: int) -> AsyncIterator[OpenDoors]:
    """Start workers with the demo model's vocabulary, a router and its doors; close them at the end."""
    async with (
        running_router(redis_url, demo_gguf, vocab_size=MODEL_VOCABULARY, **options) as rig,
        contextlib.AsyncExitStack() as stack,
    ):
        metrics = RequestMetrics()
        frontend = MeteredFrontend(rig.dispatcher, metrics, rig.dispatcher._clock)
        http = HttpServer(create_app(frontend, metrics.registry))
        server = grpc.aio.server()
        service = InferenceService(frontend, pb.GetClusterResponse)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        http_port = await http.start("127.0.0.1", 0)
        stack.push_async_callback(http.stop, 0)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}"))
        url = f"http://127.0.0.1:{http_port}/v1"
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        )
        yield OpenDoors(rig, inference_pb2_grpc.InferenceStub(channel), client, metrics.registry)
