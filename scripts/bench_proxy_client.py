"""The load of `kvhive bench proxy`: completions over connections that stay open, parsed no more than must be.

The client shares its cores with what it measures, so it costs as little as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.errors import Unavailable
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc

READ_BYTES = 256 * 1024
REQUEST_TIMEOUT_S = 60.0
_FIRST_TEXT = re.compile(rb'"(?:content|text)":\s*"[^"]')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)


@dataclass(slots=True)
class Reply:
    """One answer. Times are in seconds since it was asked for."""

    first_s: float = 0.0
    """Until the first text, or the whole answer where it is not streamed."""
    total_s: float = 0.0
    events: int = 0
    """Pieces of a stream."""


@dataclass(slots=True)
class Load:
    """What a load saw."""

    replies: list[Reply] = field(default_factory=list)
    wall_s: float = 0.0

    def first_ms(self, share: float = 0.5) -> float:
        """Return a percentile of the time to the first text."""
        times = sorted(reply.first_s for reply in self.replies)
        return times[min(len(times) - 1, int(share * len(times)))] * 1e3


Ask = Callable[[int], Awaitable[Reply]]
"""Sends the request of this number and returns how it went; raises Unavailable for anything but an answer."""
Door = Callable[[], AbstractAsyncContextManager[Ask]]
"""Opens one connection."""


async def run_load(door: Door, concurrency: int, requests: int, first_number: int = 0) -> Load:
    """Send so many requests, so many at a time, each connection one after another."""
    load, numbers = Load(), iter(range(first_number, first_number + requests))

    async def one() -> None:
        async with door() as ask:
            for number in numbers:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    load.replies.append(await ask(number))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())
    load.wall_s = time.perf_counter() - began
    return load


def http_door(base_url: str, path: str, body_of: Callable[[int], dict[str, Any]]) -> Door:
    """Return a door to a server's HTTP endpoint."""
    where = urlsplit(base_url)

    @contextlib.asynccontextmanager
    async def door() -> AsyncIterator[Ask]:
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=READ_BYTES)
        head = f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"

        async def ask(number: int) -> Reply:
            body = json.dumps(body_of(number)).encode()
            began = time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            return await _read_answer(reader, began)

        try:
            yield ask
        finally:
            writer.close()

    return door


async def _read_answer(reader: asyncio.StreamReader, began: float) -> Reply:
    reply = Reply()
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    length = _LENGTH.search(head)
    if length is not None:
        body = await reader.readexactly(int(length[1]))
    elif _CHUNKED.search(head) is not None:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body = (await reader.readexactly(size + 2))[:-2]
            reply.events += body.count(b"data:")
            if not reply.first_s and _FIRST_TEXT.search(body):
                reply.first_s = time.perf_counter() - began
        await reader.readexactly(2)
    else:
        raise Unavailable(f"an answer of no known length: {head[:200]!r}")
    if status != b"200":
        raise Unavailable(f"status {status.decode()}: {body[:300]!r}")
    reply.total_s = time.perf_counter() - began
    reply.first_s = reply.first_s or reply.total_s
    return reply


def grpc_door(target: str, request_of: Callable[[int], pb.GenerateRequest]) -> Door:
    """Return a door to a router's kvhive.v1.Inference."""

    @contextlib.asynccontextmanager
    async def door() -> AsyncIterator[Ask]:
        # A connection of its own for each, as many clients would have.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def ask(number: int) -> Reply:
                reply, began = Reply(), time.perf_counter()
                async for answer in stub.Generate(request_of(number)):
                    reply.events += 1
                    if not reply.first_s and answer.HasField("delta"):
                        reply.first_s = time.perf_counter() - began
                reply.total_s = time.perf_counter() - began
                return reply

            yield ask

    return door


def worker_door(workers: dict[str, str], token: str, request_of: Callable[[int], tuple[int, ...]]) -> Door:
    """Return a door straight to the first worker, as a router speaks to it: one token for these ids."""
    worker_id, address = next(iter(workers.items()))

    @contextlib.asynccontextmanager
    async def door() -> AsyncIterator[Ask]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)

            async def ask(number: int) -> Reply:
                sampling = worker_pb2.WorkerSampling(max_tokens=1, top_p=1, typical_p=1, repetition_penalty=1)
                request = worker_pb2.WorkerGenerateRequest(
                    worker_id=worker_id,
                    request_id=f"direct-{number}",
                    token_ids=pack_tokens(request_of(number)),
                    sampling=sampling,
                    n=1,
                )
                reply, began = Reply(), time.perf_counter()
                async for answer in stub.Generate(request, metadata=((CLUSTER_TOKEN_KEY, token),)):
                    reply.events += 1
                    if not reply.first_s and answer.updates:
                        reply.first_s = time.perf_counter() - began
                reply.total_s = time.perf_counter() - began
                return reply

            yield ask

    return door
