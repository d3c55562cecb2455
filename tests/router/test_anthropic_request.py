"""Bodies of messages become requests strictly: what is read, ignored by name, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.request import MessagesRequest, parse_count, parse_messages
from kvhive.router.chat.messages import CacheBreakpoint, ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice
from kvhive.router.request import GenerateRequest, validate_request
from kvhive.router.sampling_params import Grammar, SamplingParams

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TOOL = {"name": "weather", "description": "Sees the sky.", "input_schema": SCHEMA}
EVER = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def parse(**fields: Any) -> MessagesRequest:
    return parse_messages({"max_tokens": 9, "messages": HI, **fields}, "id-1", "")


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = parse(**fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(**fields: Any) -> str:
    """The field that the refusal names, and its words."""
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return str(caught.value)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def use(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": "Rom"}, **fields}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_absent_fields_take_anthropics_defaults() -> None:
    asked = parse()
    assert asked.request == GenerateRequest(
        ChatPrompt((ChatMessage("user", "hi"),)),
        SamplingParams(max_tokens=9, temperature=1.0),
        request_id="id-1",
    )
    assert (asked.stream, asked.prewarm, asked.ignored) == (False, False, ())


def test_every_supported_field_arrives() -> None:
    asked = parse(
        model="m",
        system="be brief",
        stream=True,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        stop_sequences=["a", "b"],
        metadata={"user_id": "u"},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    )
    request = asked.request
    assert request.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        stop=("a", "b"),
        grammar=Grammar("json_schema", SCHEMA_TEXT),
    )
    assert request.prompt == ChatPrompt(
        (ChatMessage("system", "be brief"), ChatMessage("user", "hi")),
        (Tool("weather", "Sees the sky.", SCHEMA_TEXT),),
        ToolChoice("required", "weather", parallel=False),
    )
    assert (request.model, request.tenant, asked.stream) == ("m", "u", True)
    assert asked.ignored == ("output_config.effort",)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        (None, ToolChoice("auto")),
    ],
)
def test_tool_choices(given: Any, meant: ToolChoice) -> None:
    assert prompt_of(tools=[TOOL], tool_choice=given).tool_choice == meant


def test_a_conversation_with_tools_keeps_its_order() -> None:
    prompt = prompt_of(
        system=[text("a"), text("b")],
        messages=[
            {"role": "user", "content": "Rome?"},
            assistant(text("I "), text("look."), use("c1"), use("c2")),
            user(
                result("c1", content="sun"),
                result("c2", content=[text("no "), text("sky")], is_error=True),
                text("And "),
                text("now?"),
            ),
        ],
    )
    arguments = '{"city": "Rom"}'
    assert prompt.messages == (
        ChatMessage("system", "ab"),
        ChatMessage("user", "Rome?"),
        ChatMessage(
            "assistant",
            "I look.",
            (ToolCall("c1", "weather", arguments), ToolCall("c2", "weather", arguments)),
        ),
        ChatMessage("tool", "sun", tool_call_id="c1"),
        ChatMessage("tool", "Error: no sky", tool_call_id="c2"),
        ChatMessage("user", "And now?"),
    )


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    messages = [user(text("a")), {"role": "user", "content": "b"}, assistant(text("c")), *HI]
    merged = prompt_of(messages=messages).messages
    assert merged == (ChatMessage("user", "a\n\nb"), ChatMessage("assistant", "c"), ChatMessage("user", "hi"))


def test_earlier_thoughts_are_left_out_and_named() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    asked = parse(messages=[*HI, assistant(thought, text("yes")), *HI])
    assert isinstance(asked.request.prompt, ChatPrompt)
    assert asked.request.prompt.messages[1] == ChatMessage("assistant", "yes")
    assert asked.ignored == ("messages.content.thinking",)


def test_harmless_fields_are_ignored_and_named() -> None:
    asked = parse(
        service_tier="auto",
        thinking={"type": "adaptive", "display": "omitted"},
        diagnostics={"previous_message_id": None},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        container=None,
        tools=[{**TOOL, "eager_input_streaming": True, "strict": False, "type": "custom"}],
    )
    assert asked.ignored == (
        "tools.eager_input_streaming",
        "tools.strict",
        "thinking",
        "context_management",
        "service_tier",
        "diagnostics",
    )


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": "9"}, "max_tokens: must be an integer, is a string"),
        ({"messages": None}, "messages: is required"),
        ({"messages": []}, "messages: must have a message of the user's"),
        ({"messages": [user()]}, "messages[0].content: must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: must be one of user"),
        ({"messages": [user(IMAGE)]}, "messages[0].content[0].type: must be one of text, tool_result"),
        ({"messages": [user("x")]}, "messages[0].content[0]: must be an object, is a string"),
        ({"messages": [user(text(7))]}, "messages[0].content[0].text: must be a string, is an integer"),  # type: ignore[arg-type]
        ({"messages": [user(text("x", mood="good"))]}, "messages[0].content[0].mood: is not supported"),
        ({"messages": [assistant(text("x")), *HI]}, "messages[0].role: must be user"),
        ({"messages": [*HI, assistant(text("x"))]}, "messages: must end with a message of the user's"),
        ({"messages": [user(result("c9"))]}, "messages[0].content[0].tool_use_id: must be the id"),
        ({"messages": [*HI, assistant(use("c"), use("c")), *HI]}, "messages[1].content[1].id: must be u"),
        ({"messages": [*HI, assistant(use("c")), user(result("c", content=[IMAGE]))]},
         "messages[2].content[0].content[0].type: must be one of text"),
        ({"system": [IMAGE]}, "system[0].type: must be one of text"),
        ({"system": 7}, "system: must be a string or an array of blocks, is an integer"),
        ({"temperature": 1.5}, "temperature: must be between 0 and 1.0, is 1.5"),
        ({"top_p": "x"}, "top_p: must be a number, is a string"),
        ({"stop_sequences": [1]}, "stop_sequences[0]: must be a string, is an integer"),
        ({"stream": True, "max_tokens": 0}, "stream: must be false with max_tokens 0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type: must be one of disabled"),
        ({"metadata": {"name": "x"}}, "metadata.name: is not supported"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: must be one of"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported, other than []"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0]: is not supported, other than clear_thinking"),
        ({"container": "c"}, "container: is not supported"),
        ({"n": 2}, "n: is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: must be 'custom'"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema: is required"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading: is not supported"),
        ({"tools": [{**TOOL, "input_schema": {"a": "\ud800"}}]}, "tools[0].input_schema: must be valid"),
        ({"tools": [{**TOOL, "input_schema": {"a": float("inf")}}]}, "tools[0].input_schema: must be JSON"),
        ({"tools": [{**TOOL, "input_schema": deep(64)}]}, "tools[0].input_schema: must be at most 64 obj"),
        ({"tools": [{**TOOL, "input_schema": {"a": "x" * 2**18}}]}, "tools[0].input_schema: must be at"),
        ({"output_config": {"format": {"type": "json_schema", "schema": deep(64)}}},
         "output_config.format.schema: must be at most 64 objects and arrays deep"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name: is not supported"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, Any], words: str) -> None:
    assert refused(**fields).startswith(words)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    words = refused(tools=[{**TOOL, "input_schema": deep(5_000)}])
    assert words == "tools[0].input_schema: must be at most 64 objects and arrays deep, is deeper"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [*HI, {"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"system": "\ud800"}, "system"),
        ({"messages": [*HI, assistant(use("c")), user(result("c", content="\ud800"))]},
         "messages[2].content[0].content"),
        ({"metadata": {"user_id": "u" * 999}}, "metadata.user_id"),
        ({"stop_sequences": ["s"] * 99}, "stop_sequences"),
        ({"stop_sequences": ["ok", ""]}, "stop_sequences[1]"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)  # fmt: skip
def test_limits_behind_the_door_are_named_as_the_body_names_them(fields: dict[str, Any], named: str) -> None:
    asked = parse(**fields)
    with pytest.raises(InvalidRequest) as caught:
        validate_request(asked.request, 1000, 8192)
    assert asked.spell(caught.value.field) == named


def test_max_tokens_zero_only_fills_the_cache() -> None:
    asked = parse(max_tokens=0)
    assert asked.prewarm and asked.request.sampling.max_tokens == 1


def test_what_is_counted_is_what_would_be_computed() -> None:
    body = {"messages": HI, "system": "s", "tools": [TOOL], "tool_choice": {"type": "none"}}
    counted = parse_count(body, "id-1").request.prompt
    assert counted == parse(**body).request.prompt
    with pytest.raises(InvalidRequest, match="max_tokens: is not supported"):
        parse_count({"messages": HI, "max_tokens": 5}, "id-1")


def points(**fields: Any) -> tuple[CacheBreakpoint, ...]:
    return prompt_of(**fields).breakpoints


def test_markers_become_breakpoints_where_their_blocks_end() -> None:
    assert points() == ()
    assert points(tools=[{**TOOL, "cache_control": EVER}]) == (CacheBreakpoint(300.0),)
    assert points(system=[text("ab", cache_control=HOUR), text("c")]) == (CacheBreakpoint(3600.0, 0, 2),)
    assert points(system=[text("ab"), text("c", cache_control=EVER)]) == (CacheBreakpoint(300.0, 0),)
    assert points(
        messages=[
            user(text("ab", cache_control=EVER), text("cd")),
            assistant(text("e", cache_control=EVER), use("c1", cache_control=EVER)),
            user(result("c1", content="ok", cache_control=EVER), text("f")),
        ]
    ) == (
        CacheBreakpoint(300.0, 0, 2),
        CacheBreakpoint(300.0, 1, 1),
        CacheBreakpoint(300.0, 1),
        CacheBreakpoint(300.0, 2),
    )


def test_a_marker_in_a_merged_turn_stays_where_it_was() -> None:
    messages = [user(text("ab", cache_control=EVER)), user(text("c"))]
    assert points(messages=messages) == (CacheBreakpoint(300.0, 0, 2),)


def test_the_bodys_own_marker_falls_on_the_last_block() -> None:
    assert points(cache_control=HOUR) == (CacheBreakpoint(3600.0, 0),)
    marked = [user(text("a"), text("b", cache_control=EVER))]
    assert points(messages=marked, cache_control=EVER) == (CacheBreakpoint(300.0, 0),)
    assert refused(messages=marked, cache_control=HOUR).startswith("cache_control.ttl: must be the same")


def test_tools_share_one_place_and_the_longest_ttl() -> None:
    tools = [{**TOOL, "cache_control": HOUR}, {**TOOL, "name": "b", "cache_control": EVER}]
    assert points(tools=tools) == (CacheBreakpoint(3600.0),)


def marked(count: int) -> list[Any]:
    return [user(*(text("x", cache_control=EVER) for _ in range(count)), text("y"))]


def test_four_markers_are_the_most() -> None:
    assert len(points(messages=marked(4))) == 4
    assert refused(messages=marked(5)).startswith("messages[0].content[4].cache_control: must be at most 4")
    assert refused(messages=marked(4), cache_control=EVER).startswith("cache_control: must be at most 4")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"system": [text("a", cache_control=EVER), text("b", cache_control=HOUR)]},
         "system[1].cache_control.ttl: must not be longer than that of system[0]"),
        ({"tools": [{**TOOL, "cache_control": EVER}], "system": [text("b", cache_control=HOUR)]},
         "system[0].cache_control.ttl: must not be longer than that of tools[0]"),
        ({"tools": [{**TOOL, "cache_control": EVER}], "cache_control": HOUR},
         "cache_control.ttl: must not be longer than that of tools[0]"),
        ({"system": [text("", cache_control=EVER)]}, "system[0].cache_control: must not be on an empty text"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type: must be one of ephemeral"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: must be one of 5m, 1h"),
        ({"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope: is not supported"),
        ({"messages": [*HI, assistant({"type": "thinking", "cache_control": EVER}), *HI]},
         "messages[1].content[0].cache_control: must not be on thinking"),
    ],
)  # fmt: skip
def test_markers_that_cannot_be_kept_are_refused(fields: dict[str, Any], words: str) -> None:
    assert refused(**fields).startswith(words)


def test_markers_change_nothing_of_what_the_model_reads() -> None:
    plain = prompt_of(system=[text("a"), text("b")], messages=[user(text("c"), text("d"))])
    marked = prompt_of(
        system=[text("a", cache_control=EVER), text("b")],
        messages=[user(text("c", cache_control=EVER), text("d"))],
    )
    assert marked.messages == plain.messages
