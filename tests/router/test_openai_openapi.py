"""The OpenAPI document says what the door does: what it allows is taken, what it forbids is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from http_door import say

from kvhive.router.openai import field_policy

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MARKED: dict[str, Any] = {
    "type": "text",
    "text": "say x",
    "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "5m"},
}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, say("say x")),
    (CHAT, say("say x", n=1, temperature=0, top_p=1, stop="a", logit_bias={"7": -100}, anything=None)),
    (CHAT, say("say x", logprobs=True, top_logprobs=20, stop=["a"] * 16, seed=2**64 - 1, stop_token_ids=[])),
    (CHAT, say("say x", tools=[TOOL], tool_choice="none", parallel_tool_calls=False)),
    (CHAT, say("say x", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})),
    (CHAT, say("say x", response_format={"type": "json_object"}, metadata={"a": 1}, best_of=1)),
    (CHAT, say("say x", response_format={"type": "json_schema", "json_schema": {"schema": {}, "name": "x"}})),
    (CHAT, say("say x", regex="a", prompt_cache_options={"mode": "implicit", "ttl": "24h", "prewarm": True})),
    (
        CHAT,
        say(
            "say x",
            stream_options={},
            top_logprobs=0,
            functions=[],
            function_call="auto",
            reasoning_effort="none",
        ),
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": [], "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
                {"role": "tool", "content": "7", "tool_call_id": "c"},
                {"role": "user", "content": [MARKED, {"type": "text", "text": "", "x": {}}]},
            ]
        },
    ),
    (TEXT, {"prompt": "say x", "echo": True, "logprobs": 1, "suffix": "", "model": "demo"}),
    (TEXT, {"prompt": [1, 999]}),
    (TEXT, {"prompt": ["say x", [5]], "max_tokens": 8192, "grammar": "x", "cache_salt": "s" * 256}),
    ("/tokenize", {"prompt": "say x", "return_token_strs": True, "add_special_tokens": True}),
    (
        "/tokenize",
        {**say("say x"), "tools": [TOOL], "tool_choice": "required", "add_generation_prompt": True},
    ),
    ("/detokenize", {"tokens": [1, 999], "model": None}),
]

BAD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"messages": []}),
    (CHAT, say("say x", regex="a", grammar="b")),
    (CHAT, say("say x", regex="a", response_format={"type": "text"})),
    *(
        (CHAT, say("say x", **{name: value}))
        for name, value in (
            ("n", 0),
            ("n", 17),
            ("n", True),
            ("temperature", 101),
            ("top_p", 0),
            ("max_tokens", 8193),
            ("max_tokens", 0),
            ("stop", ["a"] * 17),
            ("stop", ""),
            ("stop", "a" * 257),
            ("stop_token_ids", [1000]),
            ("logit_bias", {"07": 1}),
            ("logit_bias", {"7": 101}),
            ("logprobs", 1),
            ("seed", -1),
            ("user", "u" * 257),
            ("temprature", 1),
            ("best_of", 2),
            ("reasoning_effort", "low"),
            ("prompt", "x"),
            ("regex", ""),
            ("tools", [{"type": "custom"}]),
            ("tools", [TOOL] * 257),
            ("tools", [{"type": "function", "function": {"name": ""}}]),
            ("tool_choice", "any"),
            ("tool_choice", {"type": "function", "function": {}}),
            ("response_format", {"type": "xml"}),
            ("response_format", {"type": "json_schema"}),
            ("prompt_cache_options", {"mode": "off"}),
            ("prompt_cache_options", {"ttl": "1d"}),
            ("prompt_cache_options", {"x": 1}),
            ("prompt_cache_retention", "1h"),
            ("stream_options", {"usage": True}),
            ("stream_options", {"include_usage": True}),
            ("top_logprobs", 1),
        )
    ),
    *(
        (CHAT, {"messages": [message]})
        for message in (
            {"role": "robot", "content": "x"},
            {"role": "user"},
            {"role": "user", "content": None},
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            {"role": "user", "content": "x", "tool_call_id": "c"},
            {"role": "tool", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [{}]},
            {"role": "user", "content": "x", "audio": {"id": 1}},
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            {"role": "user", "content": [{**MARKED, "prompt_cache_breakpoint": {}}]},
        )
    ),
    (TEXT, {}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": []}),
    (TEXT, {"prompt": ["x"] * 65}),
    (TEXT, {"prompt": [1, 1000]}),
    (TEXT, {"prompt": "x", "logprobs": 21}),
    (TEXT, {"prompt": "x", "suffix": "y"}),
    (TEXT, {"prompt": "x", "tools": []}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "x", "n": 1}),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", {"tokens": [1.5]}),
]


@pytest.fixture
async def document(http: httpx.AsyncClient) -> Any:
    return (await http.get("/openapi.json")).json()


def schemas(document: Any) -> Iterator[Any]:
    for path in document["paths"].values():
        for method in path.values():
            for holder in (method.get("requestBody", {}), *method["responses"].values()):
                yield from (content["schema"] for content in holder.get("content", {}).values())


def asked(document: Any, path: str) -> jsonschema.Draft202012Validator:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(body)


async def test_every_schema_is_one(document: Any) -> None:
    found = list(schemas(document))
    assert len(found) > 40
    for schema in found:
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_what_it_allows_is_taken_and_answered_as_it_says(
    http: httpx.AsyncClient, document: Any
) -> None:
    for path, body in GOOD:
        asked(document, path).validate(body)
        response = await http.post(path, json=body)
        assert response.status_code == 200, (path, body, response.text)
        answers = document["paths"][path]["post"]["responses"]["200"]["content"]
        jsonschema.Draft202012Validator(answers["application/json"]["schema"]).validate(response.json())
    for path, name in (("/v1/models", "/v1/models"), ("/v1/models/demo", "/v1/models/{name}")):
        answers = document["paths"][name]["get"]["responses"]["200"]["content"]
        listed = (await http.get(path)).json()
        jsonschema.Draft202012Validator(answers["application/json"]["schema"]).validate(listed)


async def test_what_it_forbids_is_refused_as_it_says(http: httpx.AsyncClient, document: Any) -> None:
    for path, body in BAD:
        assert not asked(document, path).is_valid(body), (path, body)
        response = await http.post(path, json=body)
        assert response.status_code == 400, (path, body, response.text)
        answers = document["paths"][path]["post"]["responses"]["400"]["content"]
        jsonschema.Draft202012Validator(answers["application/json"]["schema"]).validate(response.json())


async def test_it_lists_exactly_what_is_obeyed(document: Any) -> None:
    for path, obeyed, neutral in (
        (CHAT, field_policy.OBEYED_IN_CHATS, field_policy.NEUTRAL_IN_CHATS),
        (TEXT, field_policy.OBEYED_IN_TEXTS, field_policy.NEUTRAL_IN_TEXTS),
    ):
        known = set(obeyed) | set(neutral) | field_policy.IGNORED
        assert set(asked(document, path).schema["properties"]) == known
