"""A client that does not read holds up its own stream, back to the worker, and nobody's memory grows."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from http_door import HEAD
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis_fixtures import eventually
from scripted_workers import scripted_cluster

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvhive.router.grpc_service import InferenceService
from kvhive.router.http_app import create_app
from kvhive.router.http_gateway import HttpServer
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import GrpcWorkerClient
from kvhive.worker.request_stream import RequestStream
from kvhive.worker.session import Session
from kvhive.worker.session_door import SessionDoor

MESSAGE_TOKENS = 500
MOST_MESSAGES = 4000
"""Of about 1.5 kB each: what sockets and HTTP/2 windows between worker and client may hold, and much more."""


class EndlessStream(RequestStream):
    """Always has more."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__([0], heard)
        self.sent = 0

    def take_into(self, response: worker_pb2.WorkerGenerateResponse, room: int) -> int:
        response.updates.add(choice=0, token_ids=[300] * MESSAGE_TOKENS)
        self.sent += 1
        return MESSAGE_TOKENS

    @property
    def ready(self) -> bool:
        return True


class EndlessWorker(worker_pb2_grpc.WorkerServicer):
    """Sends as fast as it is read, and whatever the session lets it."""

    def __init__(self) -> None:
        self.streams: list[EndlessStream] = []
        self.door = SessionDoor()

    @property
    def sent(self) -> int:
        return sum(stream.sent for stream in self.streams)

    def open(self, request: Any, heard: Callable[[], None] | None = None) -> RequestStream:
        assert heard is not None
        asyncio.get_running_loop().call_soon(heard)
        self.streams.append(EndlessStream(heard))
        return self.streams[-1]

    def close(self, request_id: str) -> None:
        """See RequestDesk."""

    async def Session(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.SessionOffer]:
        session = Session(self)
        context.add_done_callback(lambda _: session.abandon())
        yield self.door.offer(session)
        await session.wait()

    async def stands_still(self) -> bool:
        """Wait until nothing is sent for a second; False when that takes too much."""
        while self.sent < MOST_MESSAGES:
            before = self.sent
            await asyncio.sleep(1.0)
            if self.sent == before:
                return True
        return False


@asynccontextmanager
async def endless(redis: Redis, demo_gguf: Path) -> AsyncIterator[tuple[EndlessWorker, Any]]:
    """An endless worker behind real gRPC, and the dispatcher of a router in front of it."""
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1))
        cluster = await scripted_cluster(redis, TextTokenizer.load(demo_gguf), executor, count=1)
        worker, server = EndlessWorker(), grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await worker.door.open("127.0.0.1")
        stack.callback(worker.door.close)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        client = GrpcWorkerClient("token")
        stack.push_async_callback(client.close)
        generate = client.generate
        client.generate = lambda _, request: generate(f"127.0.0.1:{port}", request)  # type: ignore[method-assign]
        cluster.dispatcher._workers = client
        yield worker, cluster.dispatcher


async def test_over_grpc(index_redis: Redis, demo_gguf: Path) -> None:
    """Until it reads on; then the stream goes on, and its end frees all."""
    async with endless(index_redis, demo_gguf) as (worker, dispatcher), AsyncExitStack() as stack:
        server = grpc.aio.server()
        service = InferenceService(dispatcher, pb.GetClusterResponse)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        narrow = [("grpc.http2.bdp_probe", 0)]  # how much a client lets come unread is its own affair
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", narrow))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
        request.sampling.ignore_eos = True
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        assert await worker.stands_still()
        held = worker.sent
        for _ in range(held):
            await call.read()
        await eventually(lambda: worker.sent > held)
        call.cancel()


async def test_over_http(index_redis: Redis, demo_gguf: Path) -> None:
    async with endless(index_redis, demo_gguf) as (worker, dispatcher), AsyncExitStack() as stack:
        server = HttpServer(create_app(dispatcher, CollectorRegistry()))
        port = await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.stop, 0)
        body = {"prompt": [1, 2, 3], "stream": True, "ignore_eos": True, "max_tokens": 2000}
        data = json.dumps(body).encode()
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        narrow.connect(("127.0.0.1", port))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        writer.write((HEAD % len(data)).replace(b"chat/completions", b"completions") + data)
        await eventually(lambda: worker.sent > 0)
        assert await worker.stands_still()
        writer.close()
