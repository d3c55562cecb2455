"""Clients that mean no good, over real sockets: what they hold is bounded in number and in time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_door import HEAD, post
from prometheus_client import CollectorRegistry
from scripted_frontend import ScriptedFrontend

from kvhive.proto.config import RouterConfig
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router import doors, http_protocol
from kvhive.router.doors import Doors
from kvhive.router.grpc_service import InferenceService
from kvhive.router.http_app import create_app
from kvhive.router.http_body import OFF_LOOP_BYTES, Bodies
from kvhive.router.http_protocol import MAX_HEADERS

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http_protocol, "REST_TIMEOUT_S", 1.5)


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return what still comes before the other side closes."""
    async with asyncio.timeout(10):
        try:
            rest = await reader.read()
        except ConnectionError:
            rest = b""
    writer.close()
    return rest


async def dribble(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a byte now and then, for ever."""
    while not writer.is_closing():
        writer.write(piece)
        await asyncio.sleep(0.05)


NEVER_ENDING = [
    (b"", b""),
    (b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: ", b"x"),
    (b"GET /", b"x"),
    (b"", b"\r\n"),
    (GET, b"\r\n"),
    # Nobody reads these bodies: the route knows none, or there is no such route.
    (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n", b"x"),
    (b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
]


async def test_a_request_that_never_ends_is_closed(impatient: None, port: int) -> None:
    """Slow-loris: however steadily it sends a byte, of headers, of a body, or of empty lines."""

    async def begin(begun: bytes, piece: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        sending = asyncio.create_task(dribble(writer, piece))
        await until_closed(reader, writer)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    await asyncio.gather(*(begin(*each) for each in NEVER_ENDING))


async def test_a_long_answer_is_not_cut_by_what_its_client_began_to_send(
    impatient: None, port: int, frontend: ScriptedFrontend
) -> None:
    """Half a request, or a whole one, behind an answer that takes longer than a request may. And that the
    client has gone is noticed in spite of it."""
    body = b'{"messages": [{"role": "user", "content": "hang a"}], "stream": true}'
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for (reader, writer), behind in zip(clients, (b"GET /he", GET, HEAD % 999_999), strict=True):
        writer.write(HEAD % len(body) + body)
        await reader.readuntil(b'"a"')
        writer.write(behind)
    await asyncio.sleep(2.5)
    assert frontend.active == 3
    for reader, writer in clients:
        assert not reader.at_eof()
        writer.close()
    await frontend.until_idle()


async def test_a_kept_connection_may_ask_again(impatient: None, port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(2):
            assert (await http.get("/healthz")).status_code == 200
            await asyncio.sleep(2.0)
        assert (await http.get("/healthz")).status_code == 200


async def test_thousands_of_headers_or_requests_in_one_piece_cost_nothing(port: int) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    for sent, refusal in (
        (head + b"a: b\r\n" * MAX_HEADERS + b"\r\n", b"at most 256 headers"),
        (GET * 100, b"HTTP/1.1 200"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert refusal in await until_closed(reader, writer)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        many = [("a", "b")] * (MAX_HEADERS - 10)
        assert (await http.get("/healthz", headers=many)).status_code == 200


async def test_a_request_before_its_turn_is_dropped_and_the_connection_ends_after_the_answer(
    port: int,
) -> None:
    """Clients that send ahead must be ready to send again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET * 3)
    answer = await until_closed(reader, writer)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(b"ok") and b"connection: close" in answer


async def test_connections_beyond_the_limit_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_OPEN_CONNECTIONS", 20)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    held[0][1].write(GET)
    assert await held[0][0].readuntil(b"ok")
    assert await until_closed(*await asyncio.open_connection("127.0.0.1", port)) == b""
    held[1][1].close()
    await held[1][0].read()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    assert await reader.readuntil(b"ok"), "there is a place again"
    for _, each in (*held, (reader, writer)):
        each.close()


@contextlib.asynccontextmanager
async def open_grpc() -> AsyncIterator[str]:
    """A gRPC door over a scripted frontend; its host:port."""
    frontend = ScriptedFrontend()
    service = InferenceService(frontend, pb.GetClusterResponse)
    both = Doors(RouterConfig(), service, create_app(frontend, CollectorRegistry()))
    try:
        yield (await both.open()).grpc
    finally:
        await both.close(0)


async def test_who_watches_health_leaves_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_WATCHERS", 5)
    async with open_grpc() as address, grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(5)]
        for watch in watches:
            await watch.read()
        one_more = health.Watch(health_pb2.HealthCheckRequest())
        assert await one_more.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "5 calls watch health already" in (await one_more.details() or "")
        await health.Check(health_pb2.HealthCheckRequest())
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="say a"))][-1].HasField("finished")
        watches[0].cancel()

        async def again() -> bool:
            watch = health.Watch(health_pb2.HealthCheckRequest())
            try:
                return await watch.read() is not grpc.aio.EOF
            except grpc.aio.AioRpcError:
                return False

        async with asyncio.timeout(5):
            while not await again():
                pass


async def test_a_grpc_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is one beyond the limit, while those that were there go on."""
    names = {"grpc.max_allowed_incoming_connections": 3, "grpc.server_handshake_timeout_ms": 1000}
    options = [(name, names.get(name, value)) for name, value in doors._SERVER_OPTIONS]
    monkeypatch.setattr(doors, "_SERVER_OPTIONS", options)
    async with open_grpc() as address, contextlib.AsyncExitStack() as stack:
        host, _, port = address.partition(":")
        assert len(await until_closed(*await asyncio.open_connection(host, int(port)))) < 1000
        stubs = []
        for _ in range(3):
            channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(channel)))
            await stubs[-1].ListModels(pb.ListModelsRequest())
        assert await until_closed(*await asyncio.open_connection(host, int(port))) == b""
        for stub in stubs:
            await stub.ListModels(pb.ListModelsRequest())


async def test_a_template_of_the_callers_own_is_never_rendered(
    http: httpx.AsyncClient, frontend: ScriptedFrontend
) -> None:
    """Fault 108: nested loops in a hundred bytes, as the template or as what it is given."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    for fields in ({"chat_template": loops}, {"chat_template_kwargs": {"chat_template": loops}}):
        began = time.monotonic()
        response = await post(http, "say a", **fields)
        assert response.status_code == 400 and "chat_template" in response.json()["error"]["message"]
        assert time.monotonic() - began < 5
    assert frontend.requests == []


async def test_large_bodies_are_parsed_one_at_a_time() -> None:
    """Or their threads together keep the event loop from its turn."""
    at_once, most = 0, 0

    def parse(body: dict[str, Any]) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return len(body["a"])

    body = b'{"a": "%s"}' % (b"x" * OFF_LOOP_BYTES)
    bodies = Bodies(len(body))
    assert await asyncio.gather(*(bodies.parsed(body, parse) for _ in range(4))) == [OFF_LOOP_BYTES] * 4
    assert most == 1


async def test_other_work_in_threads_does_not_wait_for_large_bodies() -> None:
    """A list of keys is read again in one, for example: a revoked key must not live on behind bodies."""
    free = threading.Event()
    body, bodies = b'{"a": "%s"}' % (b"x" * OFF_LOOP_BYTES), Bodies(OFF_LOOP_BYTES)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    parsing = [asyncio.ensure_future(bodies.parsed(body, lambda _: free.wait(30))) for _ in range(8)]
    try:
        async with asyncio.timeout(10):
            await asyncio.to_thread(lambda: None)
        assert not any(task.done() for task in parsing)
    finally:
        free.set()
    assert all(await asyncio.gather(*parsing))


async def test_a_model_is_named_and_never_loaded_from_where_a_caller_says(
    http: httpx.AsyncClient, frontend: ScriptedFrontend, tmp_path: Path
) -> None:
    """Fault 109: a path, a URL, a folder with a pickle are names that are not served, whatever lies there."""
    (tmp_path / "adapter_model.bin").write_bytes(b"canary")
    for name in ("../../etc", "http://127.0.0.1/adapter", str(tmp_path), str(tmp_path / "adapter_model.bin")):
        answer = await post(http, "say a", model=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for field in ("lora_path", "adapter"):
        answer = await post(http, "say a", **{field: str(tmp_path)})
        assert answer.status_code == 400, "it would change the answer"
    assert frontend.requests == []
