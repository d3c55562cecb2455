"""Both doors open and close together: running streams get their grace, mere watchers hold nobody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvhive.proto.config import RouterConfig
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.doors import Doors
from kvhive.router.frontend import Delta, Finished, GenerationEvent, ModelInfo, Started, Usage
from kvhive.router.grpc_service import InferenceService
from kvhive.router.http_app import create_app
from kvhive.router.request import GenerateRequest, Prompt


class Ticking:
    """A frontend whose answers take `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("m", 100, 100)]

    def ready(self) -> bool:
        return True

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        return [1]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield Started("r", "w1", 1)
        for _ in range(10):
            await asyncio.sleep(self._seconds / 10)
            yield Delta("x", (1,))
        yield Finished("length", Usage(1, 10))


async def open_doors(seconds: float) -> tuple[Doors, str, str]:
    frontend = Ticking(seconds)
    service = InferenceService(frontend, pb.GetClusterResponse)
    doors = Doors(RouterConfig(), service, create_app(frontend, CollectorRegistry()))
    endpoints = await doors.open()
    return doors, endpoints.grpc, endpoints.http


async def test_running_streams_end_well_within_the_grace_on_both_doors() -> None:
    doors, address, url = await open_doors(seconds=1.0)
    async with grpc.aio.insecure_channel(address) as channel, httpx.AsyncClient(base_url=url) as http:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def by_grpc() -> list[pb.GenerateResponse]:
            return [r async for r in stub.Generate(pb.GenerateRequest(text="a"))]

        body = {"messages": [{"role": "user", "content": "hi"}]}
        streams = [
            asyncio.create_task(by_grpc()),
            asyncio.create_task(http.post("/v1/chat/completions", json=body)),
        ]
        await asyncio.sleep(0.3)
        await doors.close(30.0)
        responses, answer = await asyncio.gather(*streams)
        assert responses[-1].HasField("finished")
        assert answer.json()["choices"][0]["message"]["content"] == "x" * 10


async def test_a_stream_longer_than_the_grace_is_cut_and_a_watcher_holds_nobody_up() -> None:
    doors, address, _ = await open_doors(seconds=60.0)
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        started = time.monotonic()
        await doors.close(30.0)
        assert time.monotonic() - started < 10, "only generations are waited for"
    doors, address, _ = await open_doors(seconds=60.0)
    async with grpc.aio.insecure_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a"))
        await stream.read()
        started = time.monotonic()
        await doors.close(0.5)
        assert time.monotonic() - started < 10
        assert await stream.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_health_follows_what_it_is_told() -> None:
    doors, address, _ = await open_doors(seconds=0.1)
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="kvhive.v1.Inference")
        )
        seen = [(await watch.read()).status]
        for serving in (True, False):
            await doors.set_health(serving)
            await doors.set_health(serving)
            seen.append((await watch.read()).status)
        status = health_pb2.HealthCheckResponse
        assert seen == [status.SERVICE_UNKNOWN, status.SERVING, status.NOT_SERVING]
        watch.cancel()
    await doors.close(0.1)
