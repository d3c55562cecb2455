"""The HTTP door over real sockets: streams, errors, limits, cancellation and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.router.frontend import Delta, Finished, GenerationEvent, ModelInfo, Started, Usage
from kvhive.router.http_gateway import HttpServer
from kvhive.router.openai_api import create_app
from kvhive.router.request import ChatPrompt, GenerateRequest, validate_request

MAX_BODY = 200_000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


REFUSALS = {
    "busy": Overloaded("full"),
    "down": Unavailable("none"),
    "bad": InvalidRequest("prompt", "is too long"),
}


class ScriptedFrontend:
    """Answers by the last message: its words one by one, or what its first word asks for."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.active = 0
        self.is_ready = True

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("demo", 8192, 1000, "ab12", 77)]

    def ready(self) -> bool:
        return self.is_ready

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.active += 1
        try:
            validate_request(request, 1000, 8192)
            self.requests.append(request)
            assert isinstance(request.prompt, ChatPrompt)
            verb, *words = request.prompt.messages[-1].content.split()
            if verb == "refuse":
                raise REFUSALS[words[0]]
            if verb == "bug":
                raise ZeroDivisionError
            yield Started(request.request_id or "made-up", "w1", 5)
            for word in words:
                yield Delta(word, (1,))
                yield Delta("", (2,))
            if verb == "break":
                raise Unavailable("the worker was lost")
            if verb == "hang":
                await asyncio.Event().wait()
            while verb == "flood":
                yield Delta("x" * 10_000, (1,))
            yield Finished(
                "stop", Usage(5, len(words), cached_tokens=4, worker_id="w2", route_reason="prefix")
            )
        finally:
            self.active -= 1

    async def until_idle(self) -> float:
        """Return how many seconds it took until no generation was running."""
        start = time.monotonic()
        while self.active:
            assert time.monotonic() - start < 5, "a generation was not cancelled"
            await asyncio.sleep(0.005)
        return time.monotonic() - start

    async def until_active(self, count: int = 1) -> None:
        while self.active < count:  # noqa: ASYNC110 - polled, so that the script stays a plain generator
            await asyncio.sleep(0.005)


@pytest.fixture
def frontend() -> ScriptedFrontend:
    return ScriptedFrontend()


@pytest.fixture
async def port(frontend: ScriptedFrontend) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    Counter("kvhive_things", "Things", registry=registry).inc(3)
    server = HttpServer(create_app(frontend, registry, MAX_BODY, now=lambda: 1234.5))
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@pytest.fixture
async def http(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield client


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def say(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}


async def post(http: httpx.AsyncClient, content: str, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=say(content, **fields))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_the_official_client_gets_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**say("say hello there"))
    answer = raw.parse()
    assert answer.choices[0].message.content == "hellothere"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert (answer.id, answer.created, answer.model) == ("chatcmpl-made-up", 1234, "demo")
    assert raw.headers["x-kvhive-worker"] == "w1"
    assert raw.headers["x-request-id"] == "made-up"


async def test_the_official_client_streams(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(**say("say a b"), stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks if c.choices] == ["", "a", "b", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_official_client_lists_models(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [m.id for m in models] == ["demo"]
    assert (await client.models.retrieve("demo")).created == 77
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no/such")


async def test_a_stream_ends_with_done_and_without_usage_unless_asked(http: httpx.AsyncClient) -> None:
    response = await post(http, "say é 你好", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = events(response.text)
    assert parsed[-1] == "[DONE]"
    assert not any("usage" in event for event in parsed[:-1])
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in parsed[:-1]) == "é你好"


async def test_requests_arrive_with_their_identity(
    frontend: ScriptedFrontend, http: httpx.AsyncClient
) -> None:
    body = say("say x", cache_salt="s", prompt_cache_key="k", max_tokens=5)
    response = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "chatcmpl-mine"
    request = frontend.requests[0]
    assert (request.request_id, request.cache_salt, request.cache_key) == ("mine", "s", "k")
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "fields", "status", "param"),
    [
        ("say x", {"n": 0}, 400, "n"),
        ("say x", {"temperature": -1}, 400, "temperature"),
        ("say x", {"max_tokens": 0}, 400, "max_tokens"),
        ("say x", {"max_tokens": 10**9}, 400, "max_tokens"),
        ("say x", {"max_tokens": "5"}, 400, "max_tokens"),
        ("say x", {"stop": ["x"] * 100_00}, 400, "stop"),
        ("say x", {"messages": []}, 400, "messages"),
        ("say x", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ("say x", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages[0].content"),
        ("say x", {"model": "gpt-9\ud800"}, 404, "model"),
        ("refuse bad", {}, 400, "messages"),
        ("refuse busy", {}, 429, None),
        ("refuse down", {}, 503, None),
    ],
)
async def test_errors_before_the_first_event_are_plain_statuses(
    http: httpx.AsyncClient,
    content: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    response = await http.post(
        "/v1/chat/completions", content=json.dumps(say(content, stream=stream) | fields).encode()
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param and error["message"] and error["type"]
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_an_error_in_a_stream_is_an_event_and_then_the_end(http: httpx.AsyncClient) -> None:
    start = time.monotonic()
    response = await post(http, "break a b", stream=True)
    parsed = events(response.text)
    assert parsed[-1]["error"]["message"] == "the worker was lost"
    assert parsed[-2]["choices"][0]["delta"] == {"content": "b"}
    assert time.monotonic() - start < 1


async def test_the_official_client_raises_an_error_in_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**say("break a"), stream=True)
    with pytest.raises(openai.APIError, match="the worker was lost"):
        async for _ in stream:
            pass


async def test_an_error_without_a_stream_is_a_status(http: httpx.AsyncClient) -> None:
    response = await post(http, "break a b")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_fault_of_ours_is_a_500_in_the_same_shape(http: httpx.AsyncClient) -> None:
    response = await post(http, "bug")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_generation_at_once(
    frontend: ScriptedFrontend, port: int, stream: bool
) -> None:
    body = json.dumps(say("hang a", stream=stream)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % len(body) + body)
    await frontend.until_active()
    if stream:
        await reader.readuntil(b'"content":"a"')
    writer.close()
    assert await frontend.until_idle() < 1


async def test_a_cancelled_official_client_cancels_the_generation(
    frontend: ScriptedFrontend, client: openai.AsyncOpenAI
) -> None:
    task = asyncio.create_task(client.chat.completions.create(**say("hang")))
    await frontend.until_active()
    task.cancel()
    assert await frontend.until_idle() < 1
    stream = await client.chat.completions.create(**say("hang a"), stream=True)
    await anext(aiter(stream))
    await stream.close()
    assert await frontend.until_idle() < 1


async def test_many_random_leavers_leave_nothing_behind(
    frontend: ScriptedFrontend, http: httpx.AsyncClient
) -> None:
    async def leave(after_s: float) -> None:
        with pytest.raises((TimeoutError, httpx.HTTPError)):
            async with asyncio.timeout(after_s):
                await post(http, "hang a b c", stream=after_s > 0.02)

    await asyncio.gather(*(leave(0.001 * n) for n in range(40)))
    assert await frontend.until_idle() < 2
    assert (await post(http, "say ok")).json()["choices"][0]["message"]["content"] == "ok"


async def test_a_slow_reader_stops_the_generation_not_the_server(
    frontend: ScriptedFrontend, port: int, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.openai_exchange.SEND_TIMEOUT_S", 0.3)
    body = json.dumps(say("flood", stream=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(HEAD % len(body) + body)
    await frontend.until_active()
    assert (await post(http, "say ok")).status_code == 200
    assert await frontend.until_idle() < 3
    writer.close()


async def test_a_declared_body_over_the_limit_is_refused_unread(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and b"connection: close" in head.lower()
    assert b"at most 200000 bytes, is 99999999999" in await reader.read()
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
    assert (await http.get("/healthz")).text == "ok"
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
        assert 0.9 < time.monotonic() - start < 4
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
