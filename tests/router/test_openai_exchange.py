"""One exchange over a real socket: whole answers, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from http_door import HEAD, events, post, say
from redis_fixtures import eventually
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.router.frontend import Finished, GenerationEvent, Started
from kvhive.router.request import GenerateRequest


async def test_the_official_client_gets_a_whole_answer(openai_client: openai.AsyncOpenAI) -> None:
    raw = await openai_client.chat.completions.with_raw_response.create(**say("say hello there"))
    answer = raw.parse()
    assert answer.choices[0].message.content == "hellothere"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert (answer.id, answer.created, answer.model) == ("chatcmpl-made-up", 1234, "demo")
    assert raw.headers["x-kvhive-worker"] == "w1"
    assert raw.headers["x-request-id"] == "made-up"


async def test_the_official_client_streams(openai_client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = await openai_client.chat.completions.create(
        **say("say a b"), stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks if c.choices] == ["", "a", "b", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


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
    response = await post(http, "break a b", stream=True)
    parsed = events(response.text)
    assert parsed[-1]["error"]["message"] == "the worker was lost"
    assert parsed[-2]["choices"][0]["delta"] == {"content": "b"}


async def test_the_official_client_raises_an_error_in_a_stream(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(**say("break a"), stream=True)
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
    await frontend.until_idle()


async def test_a_cancelled_official_client_cancels_the_generation(
    frontend: ScriptedFrontend, openai_client: openai.AsyncOpenAI
) -> None:
    task = asyncio.create_task(openai_client.chat.completions.create(**say("hang")))
    await frontend.until_active()
    task.cancel()
    await frontend.until_idle()
    stream = await openai_client.chat.completions.create(**say("hang a"), stream=True)
    await anext(aiter(stream))
    await stream.close()
    await frontend.until_idle()


async def test_many_random_leavers_leave_nothing_behind(
    frontend: ScriptedFrontend, http: httpx.AsyncClient
) -> None:
    async def leave(after_s: float) -> None:
        with pytest.raises((TimeoutError, httpx.HTTPError)):
            async with asyncio.timeout(after_s):
                await post(http, "hang a b c", stream=after_s > 0.02)

    await asyncio.gather(*(leave(0.001 * n) for n in range(40)))
    await frontend.until_idle()
    assert (await post(http, "say ok")).json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_made_a_whole_answer_closes_in_peace(
    frontend: ScriptedFrontend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The server tells of a response that is complete in the words for a client that has gone."""
    monkeypatch.setattr("kvhive.router.http_exchange.WATCH_AFTER_S", 0.0)
    closed: list[str] = []

    async def generate(request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        try:
            yield Started("r", "w1", 5, 0.0)
            await asyncio.sleep(0.01)  # watched by now
            yield Finished("stop", USAGE)
        finally:
            closed.append("begun")
            for _ in range(9):
                await asyncio.sleep(0)
            closed.append("ended")

    monkeypatch.setattr(frontend, "generate", generate)
    assert (await post(http, "say", stream=stream)).status_code == 200
    await eventually(lambda: closed == ["begun", "ended"])


async def test_a_silent_stream_beats_and_the_official_client_hears_nothing_of_it(
    frontend: ScriptedFrontend, port: int, openai_client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.http_heartbeat.BEAT_S", 0.02)
    body = json.dumps(say("hang a", stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % len(body) + body)
    for _ in range(2):
        await reader.readuntil(b"\n: ping\n\n")
    writer.close()
    stream = await openai_client.chat.completions.create(**say("hang a"), stream=True)
    chunks = [await anext(stream) for _ in range(2)]
    with pytest.raises(TimeoutError):  # and no third one, of whatever kind
        async with asyncio.timeout(0.2):
            await anext(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a"]
    await stream.close()
    await frontend.until_idle()


async def test_a_slow_reader_stops_the_generation_not_the_server(
    frontend: ScriptedFrontend, port: int, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.http_exchange.SEND_TIMEOUT_S", 0.3)
    body = json.dumps(say("flood", stream=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(HEAD % len(body) + body)
    await frontend.until_active()
    assert (await post(http, "say ok")).status_code == 200
    await frontend.until_idle()
    await eventually(lambda: frontend.timeouts == ["slow_reader"])
    writer.close()


async def test_a_body_that_does_not_come_is_given_up_and_counted(
    frontend: ScriptedFrontend, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.http_body.BODY_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 100 + b"{")
    assert b" 408 " in await reader.readline()
    assert frontend.timeouts == ["body"]
    writer.close()
