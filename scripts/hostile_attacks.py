"""What a client can do to a router's doors out of malice, one function each; hostile.py runs them.

Each goes on until it is cancelled. What the router answers, or that it closes, is no error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = 50_000
CROWD_BYTES = (2**20, 15 * 2**20)
PAUSE_S = 0.05
_EXPECTED = (OSError, EOFError, grpc.aio.AioRpcError, TimeoutError)


async def large_bodies(http: str, target: str) -> None:
    """5 MB of text, and 5 MB of JSON's smallest pieces."""
    text = json.dumps({"prompt": "word " * 1_000_000, "max_tokens": 1}).encode()
    pieces = json.dumps({"messages": [{"role": "user", "content": "x", "a": [0] * 1_600_000}]}).encode()
    await _post_for_ever(http, [(TEXT, text), (CHAT, pieces)])


async def many_stops(http: str, target: str) -> None:
    """10,000 stop strings, and as many of the longest kind that may be."""
    await _post_for_ever(
        http,
        [
            (TEXT, _body(stop=[f"stop {i}" for i in range(10_000)])),
            (TEXT, _body(stop=["x" * 4000 + str(i) for i in range(16)], max_tokens=50)),
        ],
    )


async def deep_nesting(http: str, target: str) -> None:
    """JSON and schemas that are nested without end."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    await _post_for_ever(
        http,
        [
            (CHAT, b"[" * DEEP),
            (CHAT, b'{"messages":' * DEEP),
            (CHAT, json.dumps({"messages": messages, "response_format": form, "max_tokens": 1}).encode()),
        ],
    )


async def regex_bombs(http: str, target: str) -> None:
    """Patterns whose automata are exponential."""
    messages = [{"role": "user", "content": "x"}]
    bodies = []
    for pattern in ("(a+)+$", "(.*a){30}", "(a|b)*a(a|b){60}", "((a{1,50}){1,50}){1,50}", "\\d{1,99999}"):
        schema = {"type": "string", "pattern": pattern}
        form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
        bodies.append(
            (CHAT, json.dumps({"messages": messages, "response_format": form, "max_tokens": 2}).encode())
        )
    await _post_for_ever(http, bodies)


async def slow_heads(http: str, target: str) -> None:
    """500 requests whose headers never end, a byte at a time."""
    await _many(500, lambda: _dribble(http, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: ", b"x"))


async def slow_bodies(http: str, target: str) -> None:
    """500 bodies that never end, for a route that reads them and one that does not."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{"
    paths = (TEXT.encode(), b"/nowhere")
    await _many(
        500, lambda: _dribble(http, head % paths[0], b" "), lambda: _dribble(http, head % paths[1], b" ")
    )


async def header_floods(http: str, target: str) -> None:
    """Thousands of headers, and megabytes of one."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    await _many(
        8, lambda: _send(http, head + b"a: b\r\n" * 8000), lambda: _send(http, head + b"a: " + b"x" * 2**21)
    )


async def pipelining(http: str, target: str) -> None:
    """Thousands of requests in one piece, and nobody reads the answers."""
    await _many(16, lambda: _send(http, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 5000))


async def half_closed(http: str, target: str) -> None:
    """Clients that ask for a long answer and say no more, or leave."""
    body = _body(max_tokens=200, stream=True)
    asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    await _many(16, lambda: _send(http, asked, then_eof=True), lambda: _send(http, asked))


async def idle_streams(http: str, target: str) -> None:
    """1,000 streams that wait: connections that are kept, and calls that watch."""
    where = urlsplit(http)
    writers = []
    for _ in range(500):
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        writers.append(writer)
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(500)]
        for watch in watches:
            await watch.read()
        await asyncio.Event().wait()


async def grpc_floods(http: str, target: str) -> None:
    """Connections of gRPC that come and go, bytes that are none of it, and calls of nonsense."""
    where = urlsplit(f"//{target}")
    raw = f"http://{where.hostname}:{where.port}"

    async def call() -> None:
        async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            await inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(), timeout=5).read()

    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    await _many(32, call, lambda: _send(raw, preface + b"\xff" * 4096), lambda: _send(raw, preface))


async def grpc_crowds(http: str, target: str) -> None:
    """Messages, of a megabyte and of as many as may be, that are nothing but empty pieces."""
    pieces = (
        pb.GenerateRequest(pins=[pb.Pin()]),
        pb.GenerateRequest(sampling=pb.SamplingParams()),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()])),
        pb.GenerateRequest(sampling=pb.SamplingParams(stop=[""])),
    )
    crowds = [_crowd(piece, size) for size in CROWD_BYTES for piece in pieces]
    crowds += [pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 600_000)).SerializeToString()]

    async def call(crowd: bytes) -> None:
        async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            generate: Any = channel.unary_stream("/kvhive.v1.Inference/Generate")
            await generate(crowd, timeout=5).read()

    await _many(2, *(lambda crowd=crowd: call(crowd) for crowd in crowds))


ATTACKS: dict[str, Callable[[str, str], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        large_bodies,
        many_stops,
        deep_nesting,
        regex_bombs,
        slow_heads,
        slow_bodies,
        header_floods,
        pipelining,
        half_closed,
        idle_streams,
        grpc_floods,
        grpc_crowds,
    )
}


def _crowd(piece: pb.GenerateRequest, size: int) -> bytes:
    """Return a message of about so many bytes that has a piece of a few bytes again and again."""
    raw = piece.SerializeToString()
    if len(raw) == 2:
        return raw * (size // 2)
    # Inside its one field, so that it is that field's pieces that are many.
    inside = raw[2:] * (size // 2)
    return raw[:1] + _size(len(inside)) + inside


def _size(count: int) -> bytes:
    """Spell a number as lengths are spelled: seven bits in a byte, the last one first."""
    spelled = bytearray()
    while count > 127:
        spelled.append(count & 127 | 128)
        count >>= 7
    return bytes([*spelled, count])


def _body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()


async def _post_for_ever(http: str, posts: list[tuple[str, bytes]]) -> None:
    """Four clients, each with the next request as soon as the last one is over."""
    head = "POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
    requests = [head.format(path, len(body)).encode() + body for path, body in posts]
    await _many(4, *(lambda request=request: _send(http, request) for request in requests))


async def _many(clients: int, *acts: Callable[[], Awaitable[None]]) -> None:
    async def go_on(number: int) -> None:
        while True:
            with contextlib.suppress(*_EXPECTED):
                async with asyncio.timeout(30):
                    await acts[number % len(acts)]()
            number += 1
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(go_on(number) for number in range(clients)))


async def _send(http: str, sent: bytes, then_eof: bool = False) -> None:
    """Send it on a connection of its own, and take what comes for a while."""
    where = urlsplit(http)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(sent)
        if then_eof:
            writer.write_eof()
        async with asyncio.timeout(2):
            while await reader.read(65_536):
                pass
    finally:
        writer.transport.abort()


async def _dribble(http: str, begun: bytes, piece: bytes) -> None:
    where = urlsplit(http)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(begun)
        while not writer.is_closing():
            writer.write(piece)
            await asyncio.sleep(1.0)
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(ATTACKS[sys.argv[1]](sys.argv[2], sys.argv[3]))  # type: ignore[arg-type]
