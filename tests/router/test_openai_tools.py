"""Tools in OpenAI's dialect: how they arrive, and how the official client puts their calls together."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_door import say
from replayed_frontend import ReplayedFrontend
from scripted_frontend import USAGE

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice
from kvhive.router.frontend import Delta, Finished, TokenLogprobs, ToolCallDelta
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.schema_text import MAX_SCHEMA_CHARS

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é"]}}}
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}


def parse(**fields: Any) -> CompletionRequest:
    return parse_chat_completion({"messages": HI, **fields}, "id-1")


def chat(**fields: Any) -> ChatPrompt:
    prompt = parse(**fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_tools_arrive_with_their_schemas_as_text() -> None:
    prompt = chat(tools=[F, G])
    assert prompt.tools == (
        Tool("f", "d", '{"type":"object","properties":{"b":{"type":"string"},"a":{"enum":["é"]}}}'),
        Tool("g", "", '{"type":"object","properties":{}}'),
    )
    assert prompt.tool_choice == ToolChoice()


NAMED = {"type": "function", "function": {"name": "g"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", ToolChoice("auto"), "fg"),
        ("none", ToolChoice("none"), "fg"),
        ("required", ToolChoice("required"), "fg"),
        (NAMED, ToolChoice("required", "g"), "fg"),
        (allowed("auto", NAMED), ToolChoice("auto"), "g"),
        (allowed("required", NAMED, F), ToolChoice("required"), "fg"),
    ],
)
def test_a_choice_says_whether_and_which(choice: object, expected: ToolChoice, names: str) -> None:
    if isinstance(choice, dict) and "allowed_tools" in choice:
        choice["allowed_tools"]["tools"] = [
            {"type": "function", "function": {"name": tool["function"]["name"]}}
            for tool in choice["allowed_tools"]["tools"]
        ]
    prompt = chat(tools=[F, G], tool_choice=choice)
    assert (prompt.tool_choice, "".join(tool.name for tool in prompt.tools)) == (expected, names)
    one = chat(tools=[F, G], tool_choice=choice, parallel_tool_calls=False)
    assert not one.tool_choice.parallel


def test_a_conversation_with_calls_and_their_answers_arrives() -> None:
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]
    assert chat(messages=turns).messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("assistant", "", (ToolCall("c1", "f", '{"b": 1}'),)),
        ChatMessage("tool", "7", tool_call_id="c1"),
    )


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools: must be an array, is an object"),
        ({"tools": [F] * 257}, "tools: must be at most 256 tools, is 257"),
        ({"tools": ["f"]}, "tools[0]: must be an object, is a string"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type: must be 'function', is 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: must be an object, is null"),
        ({"tools": [F, {**F, "x": 1}]}, "tools[1].x: is not supported"),
        (
            {"tools": [{"type": "function", "function": {"name": 1}}]},
            "tools[0].function.name: must be a string, is an integer",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(64)}}]},
            "tools[0].function.parameters: must be at most 64 objects and arrays deep, is deeper",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "x" * 2**18}}}]},
            f"tools[0].function.parameters: must be at most {MAX_SCHEMA_CHARS} characters, is 262152",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "\ud800"}}}]},
            "tools[0].function.parameters: must be valid Unicode, has the lone surrogate U+D800 at 6",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1e999}}}]},
            "tools[0].function.parameters: must be JSON: Out of range float values are not JSON compliant",
        ),
        ({"tool_choice": "any"}, "tool_choice: must be auto, none, required or an object, is 'any'"),
        ({"tool_choice": 1}, "tool_choice: must be a string or an object, is an integer"),
        ({"tool_choice": {}}, "tool_choice.type: must be 'function', is null"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: must be a boolean, is an integer"),
        (
            {"tools": [F], "tool_choice": allowed("auto", NAMED)},
            "tool_choice.allowed_tools.tools[0]: must name one of the tools, is 'g'",
        ),
        (
            {"tools": [F], "tool_choice": allowed("any")},
            "tool_choice.allowed_tools.mode: must be auto or required, is 'any'",
        ),
        (
            {"messages": [{"role": "tool", "content": "7"}]},
            "messages[0].tool_call_id: must be a string, is null",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]},
            "messages[0].tool_calls[0].id: must be a string, is null",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call: is not supported",
        ),
    ],
)
def test_a_bad_tool_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("tools[3].name", "tools[3].function.name"),
        ("messages[0].tool_calls[1].arguments", "messages[0].tool_calls[1].function.arguments"),
        ("messages[0].tool_calls[1].id", "messages[0].tool_calls[1].id"),
        ("messages[2].content", "messages[2].content"),
        ("cache_control", "prompt_cache_breakpoint"),
        ("prompt", "messages"),
    ],
)
def test_refusals_behind_the_door_are_put_in_the_bodys_words(ours: str, theirs: str) -> None:
    assert parse().spell(0, ours) == theirs


POSITION = TokenLogprobs(-0.5, ((7, -0.5),))


@pytest.fixture
def frontend() -> ReplayedFrontend:
    return ReplayedFrontend(
        Delta("Let me ", (1, 2), logprobs=(POSITION, POSITION)),
        Delta("see", (3,), 1, logprobs=(POSITION,)),
        Delta("", (4,), logprobs=(POSITION,), tool_calls=(ToolCallDelta(0, "call_1", "f", ""),)),
        Delta("", (), tool_calls=(ToolCallDelta(0, arguments='{"b": '), ToolCallDelta(0, arguments='"x"}'))),
        Delta("", (5,), logprobs=(POSITION,), tool_calls=(ToolCallDelta(1, "call_2", "g", "{}"),)),
        Finished("stop", None, 1),
        Finished("tool_calls", USAGE, 0),
    )


EXPECTED = [("call_1", "function", "f", '{"b": "x"}'), ("call_2", "function", "g", "{}")]


def listed(calls: Any) -> list[tuple[str, str, str, str]]:
    return [(call.id, call.type, call.function.name, call.function.arguments) for call in calls or []]


async def test_a_whole_answer_has_its_calls(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(**say("hi", tools=[F, G], n=2, logprobs=True))
    first, second = answer.choices
    assert (first.message.content, first.finish_reason) == ("Let me ", "tool_calls")
    assert listed(first.message.tool_calls) == EXPECTED
    assert (second.message.content, second.message.tool_calls, second.finish_reason) == ("see", None, "stop")
    assert first.logprobs and len(first.logprobs.content or []) == 4


async def test_the_official_client_puts_streamed_calls_together(openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.chat.completions.stream(**say("hi", tools=[F, G], n=2, logprobs=True)) as stream:
        answer = await stream.get_final_completion()
    first, second = answer.choices
    assert listed(first.message.tool_calls) == EXPECTED
    assert (first.message.content, first.finish_reason) == ("Let me ", "tool_calls")
    assert first.logprobs and len(first.logprobs.content or []) == 4
    assert (second.message.content, second.message.tool_calls, second.finish_reason) == ("see", None, "stop")


async def test_only_a_calls_first_piece_names_it(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(**say("hi", tools=[F, G], n=2), stream=True)
    pieces = [
        piece.model_dump(exclude_none=True)
        async for chunk in stream
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert [piece.get("id") for piece in pieces] == ["call_1", None, None, "call_2"]
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1]
    assert [piece["function"].get("name") for piece in pieces] == ["f", None, None, "g"]


async def test_a_calls_answer_can_be_sent_back_as_it_came(
    openai_client: openai.AsyncOpenAI, frontend: ReplayedFrontend
) -> None:
    fields: Any = {"model": "demo", "tools": [F, G], "n": 2}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = await openai_client.chat.completions.create(messages=messages, **fields)
    messages.append(answer.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": call[0], "content": "7"} for call in EXPECTED]
    await openai_client.chat.completions.create(messages=messages, **fields)
    prompt = frontend.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    calls = tuple(ToolCall(call_id, name, text) for call_id, _, name, text in EXPECTED)
    assert prompt.messages[1] == ChatMessage("assistant", "Let me ", calls)
    assert json.loads(prompt.messages[1].tool_calls[0].arguments) == {"b": "x"}
