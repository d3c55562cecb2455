"""One message over a real socket: whole answers, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic_door import HEAD, MAX_BODY, SpeakingFrontend, call_script, events, post, say
from redis_fixtures import eventually
from scripted_frontend import USAGE

from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.frontend import Delta, Finished, KeptPrefix, ToolCallDelta, Usage

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "clock")]
CACHED = Usage(
    100,
    7,
    cached_tokens=32,
    written_tokens=64,
    worker_id="w2",
    kept=(KeptPrefix(48, 3600.0, True), KeptPrefix(80, 300.0, True), KeptPrefix(96, 300.0, False)),
    not_kept="over_budget",
)


async def test_a_whole_answer_has_every_field(claude_http: httpx.AsyncClient) -> None:
    response = await post(claude_http, "say hello there", service_tier="auto")
    assert response.json() == {
        "id": f"msg_{response.headers['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "hellothere"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 2,
            "kvhive": {
                "worker_id": "w2",
                "route_reason": "prefix",
                "reachable_tokens": 3,
                "written_tokens": 1,
                "pulled_tokens": 0,
                "failovers": 6,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
                "kept": [],
                "not_kept": None,
            },
        },
    }
    assert response.headers["x-kvhive-worker"] == "w1"
    assert response.headers["x-kvhive-ignored"] == "service_tier"


async def test_requests_arrive_with_their_identity(
    speaker: SpeakingFrontend, claude_http: httpx.AsyncClient
) -> None:
    headers = {"x-request-id": "mine", "x-kvhive-cache-key": "k", "anthropic-beta": "x"}
    body = say("say x", metadata={"user_id": "u"})
    response = await claude_http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert (response.headers["request-id"], response.json()["id"]) == ("mine", "msg_mine")
    request = speaker.requests[0]
    assert (request.request_id, request.cache_key, request.tenant) == ("mine", "k", "u")


async def test_a_stream_has_anthropics_events_in_their_order(
    speaker: SpeakingFrontend, claude_http: httpx.AsyncClient
) -> None:
    speaker.script = call_script()
    response = await post(claude_http, "x", stream=True, tools=TOOLS)
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = events(response.text)
    assert [event["type"] for event in parsed] == [
        "message_start",
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert parsed[0]["message"]["usage"]["input_tokens"] == 5
    assert parsed[0]["message"]["content"] == [] and parsed[0]["message"]["stop_reason"] is None
    assert [event["index"] for event in parsed if "index" in event] == [0] * 4 + [1] * 4 + [2] * 3
    opened = [event["content_block"] for event in parsed if event["type"] == "content_block_start"]
    assert opened == [
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "clock", "input": {}},
    ]
    deltas = [event["delta"] for event in parsed if event["type"] == "content_block_delta"]
    assert deltas[1:4] == [
        {"type": "text_delta", "text": "look."},
        {"type": "input_json_delta", "partial_json": '{"city": '},
        {"type": "input_json_delta", "partial_json": '"Zürich"}'},
    ]
    assert parsed[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert parsed[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("words", ["é 你好", 'say "}}\n\n{{', "\u2028 \\ \x00"])
async def test_text_survives_a_stream_unchanged(
    speaker: SpeakingFrontend, claude_http: httpx.AsyncClient, words: str
) -> None:
    speaker.script = [*(Delta(word, (1,)) for word in words), Finished("stop", USAGE)]
    parsed = events((await post(claude_http, "x", stream=True)).text)
    deltas = [event["delta"]["text"] for event in parsed if event["type"] == "content_block_delta"]
    assert deltas == list(words)


async def test_the_official_client_accumulates_what_a_whole_answer_has(
    speaker: SpeakingFrontend, claude: anthropic.AsyncAnthropic
) -> None:
    speaker.script, speaker.usage = call_script(), CACHED
    asked: Any = say("x", tools=TOOLS)
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[1].to_dict()["input"] == {"city": "Zürich"}
    assert (streamed.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert streamed.usage.input_tokens == whole.usage.input_tokens == 20
    assert streamed.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens == 32
    assert streamed.usage.cache_creation_input_tokens == whole.usage.cache_creation_input_tokens == 48
    assert whole.usage.cache_creation
    assert whole.usage.cache_creation.ephemeral_1h_input_tokens == 16
    assert whole.usage.cache_creation.ephemeral_5m_input_tokens == 32
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 7
    assert streamed.usage.cache_creation is None  # the client's helper leaves it out: docs/anthropic.md


@pytest.mark.parametrize(
    ("finished", "reason", "stop"),
    [
        (Finished("length", USAGE), "max_tokens", None),
        (Finished("stop", USAGE), "end_turn", None),
        (Finished("stop", USAGE, stop="END"), "stop_sequence", "END"),
        (Finished("tool_calls", USAGE), "tool_use", None),
    ],
)
async def test_stop_reasons(
    speaker: SpeakingFrontend,
    claude_http: httpx.AsyncClient,
    finished: Finished,
    reason: str,
    stop: str | None,
) -> None:
    speaker.script = [Delta("a", (1,)), finished]
    body = (await post(claude_http, "x")).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    delta = events((await post(claude_http, "x", stream=True)).text)[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": stop}


async def test_an_answer_of_nothing_has_no_blocks(
    speaker: SpeakingFrontend, claude: anthropic.AsyncAnthropic
) -> None:
    speaker.script = [Delta("", (1,)), Finished("stop", USAGE)]
    asked: Any = say("x")
    assert (await claude.messages.create(**asked)).content == []
    async with claude.messages.stream(**asked) as stream:
        assert (await stream.get_final_message()).content == []


async def test_a_call_that_was_cut_off_has_no_input(
    speaker: SpeakingFrontend, claude_http: httpx.AsyncClient
) -> None:
    speaker.script = [*call_script()[:4], Finished("length", USAGE)]
    body = (await post(claude_http, "x", tools=TOOLS)).json()
    assert body["content"][1] == {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("value", ['"\\ud83d"', "1e999", "NaN", "9" * 5000, "[" * 5000])
async def test_a_call_that_json_cannot_hold_has_no_input(
    speaker: SpeakingFrontend, claude_http: httpx.AsyncClient, value: str
) -> None:
    """The model wrote it, and the rest of the answer is whole."""
    call = ToolCallDelta(0, "call_a", "weather", f'{{"x": {value}}}')
    speaker.script = [Delta("", (1,), tool_calls=(call,)), Finished("tool_calls", USAGE)]
    response = await post(claude_http, "x", tools=TOOLS)
    assert response.status_code == 200
    assert response.json()["content"] == [
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
    ]


async def test_a_silent_stream_is_pinged(
    speaker: SpeakingFrontend, claude_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.http_heartbeat.BEAT_S", 0.02)
    body = json.dumps(say("hang a", stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", claude_port)
    writer.write(HEAD % len(body) + body)
    for _ in range(2):
        await reader.readuntil(b'event: ping\ndata: {"type":"ping"}\n\n')
    writer.close()
    await speaker.until_idle()


@pytest.mark.parametrize(
    ("content", "fields", "status", "kind"),
    [
        ("say x", {"max_tokens": None}, 400, "invalid_request_error"),
        ("say x", {"model": "claude-9\ud800"}, 404, "not_found_error"),
        ("say x", {"system": "x" * MAX_BODY}, 413, "request_too_large"),
        ("refuse bad", {}, 400, "invalid_request_error"),
        ("refuse busy", {}, 529, "overloaded_error"),
        ("refuse down", {}, 503, "api_error"),
        ("refuse late", {}, 504, "timeout_error"),
        ("refuse broken", {}, 500, "api_error"),
        ("bug", {}, 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_event_are_plain_statuses(
    claude_http: httpx.AsyncClient,
    content: str,
    fields: dict[str, Any],
    status: int,
    kind: str,
    stream: bool,
) -> None:
    response = await post(claude_http, content, stream=stream, **fields)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"]
    assert body["request_id"] == response.headers.get("request-id")
    assert ("retry-after" in response.headers) == (status in (503, 529))


async def test_retry_after_says_when(claude_http: httpx.AsyncClient) -> None:
    headers = (await post(claude_http, "refuse later")).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("8", "7250")


async def test_errors_name_the_fields_of_the_body(claude_http: httpx.AsyncClient) -> None:
    error = (await post(claude_http, "refuse bad")).json()["error"]
    assert error["message"] == "messages: is too long"


async def test_an_error_in_a_stream_is_its_last_event(claude_http: httpx.AsyncClient) -> None:
    response = await post(claude_http, "break a b", stream=True)
    last = events(response.text)[-1]
    assert last["error"] == {"type": "api_error", "message": "the worker was lost"}
    assert last["request_id"] == response.headers["request-id"]


async def test_the_official_client_raises_what_it_knows(claude: anthropic.AsyncAnthropic) -> None:
    for content, kind in {
        "refuse bad": anthropic.BadRequestError,
        "refuse busy": anthropic._exceptions.OverloadedError,
        "refuse down": anthropic._exceptions.ServiceUnavailableError,
    }.items():
        asked: Any = say(content)
        with pytest.raises(kind) as caught:
            await claude.messages.create(**asked)
        assert caught.value.request_id
    asked = say("break a", stream=True)
    with pytest.raises(anthropic.APIError, match="the worker was lost"):
        async for _ in await claude.messages.create(**asked):
            pass


@pytest.mark.parametrize("content", ["refuse busy", "refuse down"])
async def test_the_official_client_tries_again_where_that_may_help(
    claude: anthropic.AsyncAnthropic, speaker: SpeakingFrontend, content: str
) -> None:
    asked: Any = say("refuse soon" if content == "refuse busy" else content)
    with pytest.raises(anthropic.InternalServerError):
        await claude.with_options(max_retries=1).messages.create(**asked)
    assert len(speaker.requests) == 2


@pytest.mark.parametrize("path", ["/v1/messages/none", "/v1/messages"])
async def test_unknown_routes_and_methods_answer_in_the_dialect(
    claude_http: httpx.AsyncClient, path: str
) -> None:
    body = (await claude_http.get(path)).json()
    assert body["type"] == "error" and body["error"]["type"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_generation_at_once(
    speaker: SpeakingFrontend, claude_port: int, stream: bool
) -> None:
    body = json.dumps(say("hang a", stream=stream)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", claude_port)
    writer.write(HEAD % len(body) + body)
    await speaker.until_active()
    if stream:
        await reader.readuntil(b'"text":"a"')
    writer.close()
    await speaker.until_idle()


async def test_a_slow_reader_stops_the_generation(
    speaker: SpeakingFrontend, claude_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhive.router.http_exchange.SEND_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvhive.router.http_heartbeat.BEAT_S", 0.05)
    body = json.dumps(say("flood", stream=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", claude_port, limit=1024)
    writer.write(HEAD % len(body) + body)
    await speaker.until_active()
    await speaker.until_idle()
    await eventually(lambda: speaker.timeouts == ["slow_reader"])
    writer.close()


async def test_max_tokens_zero_answers_when_the_prompt_is_cached(
    speaker: SpeakingFrontend, claude: anthropic.AsyncAnthropic
) -> None:
    asked: Any = say("say x") | {"max_tokens": 0}
    answer = await claude.messages.create(**asked)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)
    assert len(speaker.prewarmed) == 1 and not speaker.requests


async def test_tokens_are_counted(claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(
        model="demo", system="be brief", messages=[{"role": "user", "content": "say a b c"}]
    )
    assert counted.input_tokens == 3
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        await claude.messages.count_tokens(
            model="demo", messages=[{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="x", messages=[{"role": "user", "content": "say a"}])


@pytest.mark.parametrize(
    ("content", "model", "status"),
    [("say a", "demo", 200), ("say a", "x", 404), ("refuse bad", "demo", 400), ("refuse busy", "demo", 529)],
)
async def test_a_count_has_the_headers_of_an_answer(
    claude_http: httpx.AsyncClient, content: str, model: str, status: int
) -> None:
    body = say(content, model=model, service_tier="auto")
    del body["max_tokens"]
    response = await claude_http.post(
        "/v1/messages/count_tokens", json=body, headers={"x-request-id": "mine"}
    )
    assert (response.status_code, response.headers["request-id"]) == (status, "mine")
    assert response.headers.get("x-kvhive-ignored") == ("service_tier" if status == 200 else None)


async def test_models_answer_each_client_in_its_own_shape(
    claude: anthropic.AsyncAnthropic, claude_http: httpx.AsyncClient
) -> None:
    (model,) = [model async for model in claude.models.list()]
    assert (model.id, model.created_at.year, model.max_input_tokens) == ("demo", 1970, 8192)
    assert (await claude.models.retrieve("demo")).display_name == "demo"
    with pytest.raises(anthropic.NotFoundError):
        await claude.models.retrieve("x")
    assert (await claude_http.get("/v1/models")).json()["object"] == "list"
    assert (await claude_http.get("/v1/models/demo")).json()["object"] == "model"


async def test_breakpoints_reach_the_router(
    speaker: SpeakingFrontend, claude: anthropic.AsyncAnthropic
) -> None:
    await claude.messages.create(
        model="demo",
        max_tokens=5,
        cache_control={"type": "ephemeral"},
        system=[{"type": "text", "text": "long", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[{"role": "user", "content": "say x"}],
    )
    prompt = speaker.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(point.ttl_s, point.message) for point in prompt.breakpoints] == [(3600.0, 0), (300.0, 1)]
