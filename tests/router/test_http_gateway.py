"""The HTTP door over real sockets: bodies, headers, limits, health and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from http_door import MAX_BODY, events, post, say
from prometheus_client import CollectorRegistry
from scripted_frontend import ScriptedFrontend

from kvhive.router.http_app import create_app
from kvhive.router.http_gateway import HttpServer


async def test_the_official_client_lists_models(openai_client: openai.AsyncOpenAI) -> None:
    models = (await openai_client.models.list()).data
    assert [m.id for m in models] == ["demo"]
    assert (await openai_client.models.retrieve("demo")).created == 77
    with pytest.raises(openai.NotFoundError):
        await openai_client.models.retrieve("no/such")


async def test_a_declared_body_over_the_limit_is_refused_unread(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and b"connection: close" in head.lower()
    assert b"at most %d bytes, is 99999999999" % MAX_BODY in await reader.read()
    writer.close()


async def test_a_chunked_body_over_the_limit_is_refused_on_the_way(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    sent = 0
    answer = asyncio.create_task(reader.readline())
    while not answer.done() and sent < 100:
        writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        sent += 1
        await asyncio.sleep(0.002)
    assert (await answer).startswith(b"HTTP/1.1 413")
    assert sent < 100
    writer.close()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"a": "\xff"}', b"[" * 100_000, b'{"messages":' * 10_000, b'{"n": NaN}']
)
async def test_broken_bodies_are_400(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"


async def test_large_bodies_are_parsed_and_answered(
    frontend: ScriptedFrontend, http: httpx.AsyncClient
) -> None:
    response = await http.post("/v1/chat/completions", json=say("say " + "w " * 90_000))
    assert response.status_code == 200
    assert len(response.json()["choices"][0]["message"]["content"]) == 90_000


@pytest.mark.parametrize("header", ["a b", "x" * 129, "é"])
async def test_a_bad_request_id_is_refused_and_not_echoed(http: httpx.AsyncClient, header: str) -> None:
    response = await http.post(
        "/v1/chat/completions", json=say("say x"), headers={"x-request-id": header.encode("latin-1")}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    assert "x-request-id" not in response.headers


async def test_health_readiness_metrics_and_unknown_paths(
    frontend: ScriptedFrontend, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/healthz")).text == (await http.get("/health")).text == "ok"
    assert (await http.get("/readyz")).status_code == 200
    frontend.is_ready = False
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    metrics = await http.get("/metrics")
    assert "kvhive_things_total 3.0" in metrics.text
    for method, path, status in [("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405)]:
        response = await http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 8192


async def test_oversized_headers_are_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 1_000_000)
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_a_stopping_server_waits_and_then_says_goodbye(
    frontend: ScriptedFrontend,
) -> None:
    server = HttpServer(create_app(frontend, CollectorRegistry()))
    before = signal.getsignal(signal.SIGTERM)
    port = await server.start("127.0.0.1", 0)
    assert signal.getsignal(signal.SIGTERM) == before
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        streamed = asyncio.create_task(post(http, "hang a", stream=True))
        whole = asyncio.create_task(post(http, "hang"))
        await frontend.until_active(2)
        start = time.monotonic()
        await server.stop(1)
        assert 0.9 < time.monotonic() - start < 9  # 1 s of grace; hanging streams would take for ever
        assert events((await streamed).text)[-1]["error"]["message"] == "the server is shutting down"
        assert (await whole).status_code == 503
        assert frontend.active == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")
    await server.stop(1)


async def test_a_taken_port_is_an_error(port: int, frontend: ScriptedFrontend) -> None:
    with pytest.raises(OSError):
        await HttpServer(create_app(frontend, CollectorRegistry())).start("127.0.0.1", port)


async def test_it_serves_by_name(frontend: ScriptedFrontend) -> None:
    server = HttpServer(create_app(frontend, CollectorRegistry()))
    port = await server.start("localhost", 0)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://localhost:{port}/healthz")).status_code == 200
    await server.stop(0)


async def test_no_token_waits_for_an_acknowledgement(frontend: ScriptedFrontend) -> None:
    """Nagle's algorithm is off on accepted connections, or each token comes 40 ms late."""
    server = HttpServer(create_app(frontend, CollectorRegistry()))
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readline()
    connections = server._server.server_state.connections
    (accepted,) = (connection.transport.get_extra_info("socket") for connection in connections)
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await server.stop(0)


async def test_what_is_no_body_is_bounded_after_the_headers_too(port: int) -> None:
    """Trailers and the framing of chunks would otherwise be kept for as long as a client sends them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(b"2\r\n{}\r\n0\r\nA: " + b"x" * 1_000_000)
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_a_long_body_in_small_chunks_is_no_overhead(http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = json.dumps(say("say " + "w " * 20_000)).encode()
        for start in range(0, len(body), 16):
            yield body[start : start + 16]

    response = await http.post(
        "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
