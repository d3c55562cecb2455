"""What the OpenAPI document says of Anthropic's dialect is what the door does. See test_openai_openapi."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from kvhive.router.anthropic import errors

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MARKER = {"type": "ephemeral", "ttl": "1h"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
TEXT: dict[str, Any] = {"type": "text", "text": "say x"}
CALLED = [
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "?", "signature": ""}, CALL]},
]


def asking(*content: object, **fields: Any) -> dict[str, Any]:
    """A body with one message, of this content or a plain one."""
    message = {"role": "user", "content": list(content) or "say x"}
    return {"max_tokens": 20, "messages": [message], **fields}


GOOD: list[dict[str, Any]] = [
    asking(),
    asking(model="demo", temperature=1, top_k=0, top_p=0.5, stop_sequences=["a" * 256] * 16, anything=None),
    asking(max_tokens=0, stream=False, system="x", cache_control=MARKER),
    asking(system=[{**TEXT, "cache_control": {"type": "ephemeral"}}], metadata={"user_id": "u" * 256}),
    asking({**TEXT, "cache_control": MARKER, "citations": []}, service_tier="auto", mcp_servers=[]),
    asking(tools=[{**TOOL, "type": "custom", "description": "", "strict": True, "cache_control": MARKER}]),
    asking(tools=[{**TOOL, "defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}]),
    asking(tools=[TOOL], tool_choice={"type": "none", "disable_parallel_tool_use": True}),
    asking(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}),
    asking(output_config={"format": {"type": "json_schema", "schema": {}}, "effort": "low"}),
    asking(
        thinking={"type": "adaptive", "x": 1}, context_management={"edits": [{"type": "clear_thinking_1"}]}
    ),
    asking(messages=[*CALLED, {"role": "user", "content": [{**RESULT, "is_error": True}, TEXT]}]),
    asking(messages=[*CALLED, {"role": "user", "content": [{**RESULT, "content": [TEXT]}]}]),
    asking(messages=[{"role": "system", "content": "x"}, *asking()["messages"]]),
]
BAD: list[dict[str, Any]] = [
    {"messages": asking()["messages"]},
    {"max_tokens": 1},
    asking(max_tokens=0, stream=True),
    *(
        asking(**{name: value})
        for name, value in (
            ("max_tokens", -1),
            ("max_tokens", 8193),
            ("max_tokens", "1"),
            ("messages", []),
            ("model", "other"),
            ("system", 7),
            ("system", [{"type": "image"}]),
            ("temperature", 1.5),
            ("top_k", -1),
            ("top_p", 0),
            ("stop_sequences", "a"),
            ("stop_sequences", ["a"] * 17),
            ("stop_sequences", [""]),
            ("stream", 1),
            ("metadata", {"user": "x"}),
            ("metadata", {"user_id": "u" * 257}),
            ("tools", [{"name": "f"}]),
            ("tools", [{**TOOL, "type": "bash_20250124"}]),
            ("tools", [{**TOOL, "defer_loading": True}]),
            ("tools", [{**TOOL, "name": "a b"}]),
            ("tools", [TOOL] * 257),
            ("tool_choice", "any"),
            ("tool_choice", {"type": "tool"}),
            ("tool_choice", {"type": "auto", "name": "f"}),
            ("cache_control", {"type": "ephemeral", "ttl": "2h"}),
            ("cache_control", {}),
            ("output_config", {"format": {"type": "text"}}),
            ("output_config", {"x": 1}),
            ("thinking", {"type": "enabled", "budget_tokens": 1024}),
            ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
            ("container", "c"),
            ("mcp_servers", [{}]),
            ("n", 1),
        )
    ),
    *(
        asking(messages=[message])
        for message in (
            {"role": "robot", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "user"},
            {"role": "user", "content": ""},
            {"role": "user", "content": []},
            {"role": "user", "content": "x", "name": "me"},
            {"role": "user", "content": [CALL]},
            {"role": "user", "content": [{"type": "image", "source": {}}]},
            {"role": "user", "content": [{"type": "tool_result"}]},
            {"role": "assistant", "content": [{**CALL, "input": "{}"}]},
            {"role": "assistant", "content": [{"type": "thinking", "cache_control": MARKER}]},
        )
    ),
]
NOT_COUNTED = {"max_tokens", "stream", "temperature", "top_k", "top_p", "stop_sequences", "metadata"}


@pytest.fixture
async def paths(http: httpx.AsyncClient) -> Any:
    return (await http.get("/openapi.json")).json()["paths"]


def asked(paths: Any, path: str) -> jsonschema.Draft202012Validator:
    body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(body)


def answered(operation: Any, status: int) -> jsonschema.Draft202012Validator:
    content = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(content)


async def test_what_it_allows_is_taken_and_answered_as_it_says(http: httpx.AsyncClient, paths: Any) -> None:
    for body in GOOD:
        counted = {name: value for name, value in body.items() if name not in NOT_COUNTED}
        for path, sent in ((MESSAGES, body), (COUNT, counted)):
            asked(paths, path).validate(sent)
            response = await http.post(path, json=sent)
            assert response.status_code == 200, (path, sent, response.text)
            answered(paths[path]["post"], 200).validate(response.json())


async def test_what_it_forbids_is_refused_as_it_says(http: httpx.AsyncClient, paths: Any) -> None:
    for body in BAD:
        assert not asked(paths, MESSAGES).is_valid(body), body
        response = await http.post(MESSAGES, json=body)
        status = 404 if body.get("model") else 400
        assert response.status_code == status, (body, response.text)
        answered(paths[MESSAGES]["post"], status).validate(response.json())
    for name in NOT_COUNTED:
        body = {"messages": asking()["messages"], name: 1}
        assert not asked(paths, COUNT).is_valid(body)
        assert (await http.post(COUNT, json=body)).status_code == 400


async def test_models_are_described_in_the_words_of_whoever_asks(http: httpx.AsyncClient, paths: Any) -> None:
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        for path, name in (("/v1/models", "/v1/models"), ("/v1/models/demo", "/v1/models/{name}")):
            listed = await http.get(path, headers=headers)
            answered(paths[name]["get"], 200).validate(listed.json())
        missing = await http.get("/v1/models/other", headers=headers)
        answered(paths["/v1/models/{name}"]["get"], 404).validate(missing.json())


async def test_every_status_of_its_errors_is_there(paths: Any) -> None:
    for path in (MESSAGES, COUNT):
        # 403 is for nobody here; 405 is no answer to a POST; 429 is 529.
        assert {int(s) for s in paths[path]["post"]["responses"]} - {200} == set(errors.KINDS) - {
            403,
            405,
            429,
        }
