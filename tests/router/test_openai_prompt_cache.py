"""OpenAI's words for the prompt's cache: breakpoints, lifetimes, prewarming, and what the answer says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from http_door import events, post, say
from replayed_frontend import ReplayedFrontend
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import CacheBreakpoint, ChatPrompt
from kvhive.router.frontend import Finished, KeptPrefix
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.text_request import parse_text_completion
from kvhive.router.request import PromptPin

PLAIN: dict[str, Any] = {"role": "user", "content": "hi"}


def parse(*messages: Any, **fields: Any) -> CompletionRequest:
    return parse_chat_completion({"messages": list(messages) or [PLAIN], **fields}, "id-1")


def points(*messages: Any, **options: Any) -> tuple[CacheBreakpoint, ...]:
    fields = {"prompt_cache_options": options} if options else {}
    prompt = parse(*messages, **fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.breakpoints


def part(text: str, **marker: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | (
        {"prompt_cache_breakpoint": {"mode": "explicit", **marker}} if marker else {}
    )


def turn(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_nobody_who_says_nothing_keeps_anything() -> None:
    assert points() == points(mode="implicit") == points(mode="explicit") == ()
    assert parse(prompt_cache_retention="24h").ignored == ("prompt_cache_retention",)
    assert parse(prompt_cache_options={"mode": "explicit"}).ignored == ("prompt_cache_options.mode",)


def test_a_lifetime_keeps_the_whole_prompt() -> None:
    assert points(PLAIN, PLAIN, ttl="30m") == (CacheBreakpoint(1800.0, 1),)
    assert points(ttl="24h") == (CacheBreakpoint(86400.0, 0),)
    assert points(ttl="45s", mode="explicit") == ()


def test_explicit_breakpoints_end_where_their_part_does() -> None:
    marked = turn(part("abc", ttl="5m"), part("de"), part("f", ttl="12h"))
    expected = (CacheBreakpoint(300.0, 0, 3), CacheBreakpoint(43200.0, 0))
    assert points(marked, mode="explicit", ttl="1h") == expected
    assert points(marked, PLAIN, ttl="1h") == (*expected, CacheBreakpoint(3600.0, 1))
    inherits = turn({**part("abc"), "prompt_cache_breakpoint": {"mode": "explicit"}}, part("d"))
    assert points(inherits, mode="explicit", ttl="1h") == (CacheBreakpoint(3600.0, 0, 3),)
    assert points(inherits) == (CacheBreakpoint(1800.0, 0, 3),)


def test_one_place_has_one_breakpoint_and_a_request_has_the_last_four() -> None:
    assert points(turn(part("a", ttl="12h")), ttl="30m") == (CacheBreakpoint(43200.0, 0),)
    turns = [turn(part("a", ttl=f"{number}m")) for number in range(1, 7)]
    assert [point.ttl_s for point in points(*turns)] == [180, 240, 300, 360]
    assert [point.ttl_s for point in points(*turns, PLAIN, ttl="9m")] == [240, 300, 360, 540]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention: must be in_memory or 24h, is '1h'"),
        ({"prompt_cache_options": []}, "prompt_cache_options: must be an object, is an array"),
        ({"prompt_cache_options": {"x": 1}}, "prompt_cache_options.x: is not supported"),
        (
            {"prompt_cache_options": {"mode": "off"}},
            "prompt_cache_options.mode: must be implicit or explicit, is 'off'",
        ),
        (
            {"prompt_cache_options": {"ttl": "25h"}},
            "prompt_cache_options.ttl: must be like 30m, with s, m or h, and at most 24h, is '25h'",
        ),
        (
            {"prompt_cache_options": {"ttl": 5}},
            "prompt_cache_options.ttl: must be like 30m, with s, m or h, and at most 24h, is an integer",
        ),
        (
            {"prompt_cache_options": {"prewarm": 1}},
            "prompt_cache_options.prewarm: must be a boolean, is an integer",
        ),
        (
            {"messages": [turn({"type": "text", "text": "a", "prompt_cache_breakpoint": {}})]},
            "messages[0].content[0].prompt_cache_breakpoint.mode: must be 'explicit', is null",
        ),
        (
            {"messages": [turn(part("a", ttl="0m"))]},
            "messages[0].content[0].prompt_cache_breakpoint.ttl: must be like 30m, with s, m or h, "
            "and at most 24h, is '0m'",
        ),
        (
            {"messages": [turn(*[part("a", ttl="1m")] * 1025)]},
            "prompt_cache_breakpoint: must be at most 1024 in a request, is 1025",
        ),
    ],
)
def test_a_bad_wish_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_completion({"messages": [PLAIN], **fields}, "")
    assert str(caught.value) == message


def test_prompts_without_parts_are_kept_as_a_whole() -> None:
    asked = parse_text_completion({"prompt": ["a", "b"], "prompt_cache_options": {"ttl": "30m"}}, "")
    assert [request.pins for request in asked.requests] == [(PromptPin(1800.0),)] * 2
    assert parse_text_completion({"prompt": "a"}, "").request.pins == ()


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"request_id": "mine"}])
async def test_prewarming_answers_with_nothing_but_the_usage(
    openai_client: openai.AsyncOpenAI, frontend: ScriptedFrontend, fields: dict[str, Any]
) -> None:
    headers = {"x-request-id": fields.pop("request_id", "")}
    raw = await openai_client.chat.completions.with_raw_response.create(
        **say("say x", **fields),
        extra_body={"prompt_cache_options": {"prewarm": True}},
        extra_headers=headers,
    )
    answer = raw.parse()
    assert [choice.message.content for choice in answer.choices] == [""] * fields.get("n", 1)
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cache_write_tokens == 2
    assert raw.headers["x-kvhive-worker"] == "w0"
    assert not headers["x-request-id"] or answer.id == "chatcmpl-mine"
    assert not frontend.requests  # it was no generation


async def test_prewarming_streams_and_refuses_as_a_generation_does(http: httpx.AsyncClient) -> None:
    options = {"prompt_cache_options": {"prewarm": True}}
    response = await post(http, "say x", stream=True, stream_options={"include_usage": True}, **options)
    *_, end, usage, done = events(response.text)
    assert end["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"
    assert usage["usage"]["prompt_tokens"] == 7
    for content, more, status in (
        ("refuse busy", {}, 429),
        ("say x", {"n": 0}, 400),
        ("say x", {"top_p": 2}, 400),
    ):
        assert (await post(http, content, **more, **options)).status_code == status
    response = await http.post("/v1/completions", json={"prompt": "say x", "echo": True, **options})
    assert response.json()["error"]["param"] == "prompt_cache_options.prewarm"


class TestUsage:
    """What became of the breakpoints is in the usage."""

    @pytest.fixture
    def frontend(self) -> ReplayedFrontend:
        kept = (KeptPrefix(64, 1800.0, True), KeptPrefix(128, 300.0, False, "over_budget"))
        return ReplayedFrontend(Finished("stop", replace(USAGE, kept=kept, not_kept="over_budget")))

    async def test_it_tells_what_is_kept(self, openai_client: openai.AsyncOpenAI) -> None:
        answer = await openai_client.chat.completions.create(**say("hi"))
        assert answer.usage and answer.usage.prompt_tokens_details
        details = answer.usage.prompt_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (4, 1)
        ours = answer.usage.model_extra["kvhive"] if answer.usage.model_extra else {}
        assert ours["kept"] == [
            {"tokens": 64, "ttl_s": 1800.0, "kept": True, "not_kept": None},
            {"tokens": 128, "ttl_s": 300.0, "kept": False, "not_kept": "over_budget"},
        ]
        assert ours["not_kept"] == "over_budget"
        both = await openai_client.completions.create(model="demo", prompt=["a", "b"])
        extra = both.usage.model_extra if both.usage else None
        assert extra and len(extra["kvhive"]["kept"]) == 4 and extra["kvhive"]["not_kept"] == "over_budget"
