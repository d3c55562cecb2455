"""Messages of kvhive.v1 and the router's own words: every field has its place, and 0 is not unset."""

from __future__ import annotations

from typing import Any

import pytest

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_LOGPROBS
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.chat.messages import CacheBreakpoint, ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice
from kvhive.router.frontend import Delta, Finished, KeptPrefix, TokenLogprobs, ToolCallDelta, Usage
from kvhive.router.grpc_requests import DEFAULT_TTL_S, NO_PARAMETERS, generate_request, prewarm_request
from kvhive.router.grpc_responses import MAX_POSITIONS, generate_responses, prewarm_response
from kvhive.router.request import PromptPin
from kvhive.router.sampling_params import Grammar

CLIENTS_TAKE = 4 * 1024 * 1024
USER = pb.ChatMessage(role="user", content="hi")


def asked(**fields: Any) -> Any:
    return generate_request(pb.GenerateRequest(**fields), None)


def chat(**fields: Any) -> ChatPrompt:
    prompt = asked(chat=pb.Chat(**fields)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_conversation_with_tools_arrives_whole() -> None:
    call = pb.ToolCall(id="c1", name="sum", arguments='{"b":1}')
    prompt = chat(
        messages=[
            USER,
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="3", tool_call_id="c1"),
        ],
        tools=[pb.Tool(name="sum", description="adds", parameters='{"type":"object"}'), pb.Tool(name="now")],
        tool_choice=pb.ToolChoice(mode=pb.ToolChoice.REQUIRED, name="sum", parallel=False),
    )
    assert prompt == ChatPrompt(
        messages=(
            ChatMessage("user", "hi"),
            ChatMessage("assistant", "", (ToolCall("c1", "sum", '{"b":1}'),)),
            ChatMessage("tool", "3", tool_call_id="c1"),
        ),
        tools=(Tool("sum", "adds", '{"type":"object"}'), Tool("now", "", NO_PARAMETERS)),
        tool_choice=ToolChoice("required", "sum", parallel=False),
    )


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        (None, ToolChoice()),
        (pb.ToolChoice(), ToolChoice("auto", parallel=True)),
        (pb.ToolChoice(mode=pb.ToolChoice.NONE), ToolChoice("none")),
        (pb.ToolChoice(parallel=False), ToolChoice("auto", parallel=False)),
    ],
)
def test_a_tool_choice_that_says_nothing_is_the_models(
    wire: pb.ToolChoice | None, choice: ToolChoice
) -> None:
    assert chat(messages=[USER], tools=[pb.Tool(name="f")], tool_choice=wire).tool_choice == choice


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (pb.ToolChoice(mode=7), "tool_choice.mode"),  # type: ignore[arg-type]
        (pb.ToolChoice(name="f"), "tool_choice.name"),
    ],
)
def test_a_tool_choice_that_cannot_be_meant_is_named(wire: pb.ToolChoice, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(messages=[USER], tools=[pb.Tool(name="f")], tool_choice=wire)
    assert error.value.field == field


def test_breakpoints_stand_in_the_order_of_the_prompt() -> None:
    control = pb.CacheControl
    prompt = chat(
        messages=[pb.ChatMessage(role="system", content="s", cache_control=control(ttl_s=60)), USER],
        tools=[pb.Tool(name="a"), pb.Tool(name="b", cache_control=control())],
    )
    assert prompt.breakpoints == (CacheBreakpoint(DEFAULT_TTL_S), CacheBreakpoint(60.0, 0))


def test_a_pin_of_0_is_not_a_pin_that_leaves_it_open() -> None:
    request = asked(text="x", pins=[pb.Pin(), pb.Pin(ttl_s=0, tokens=0), pb.Pin(tokens=32)])
    assert request.pins == (PromptPin(DEFAULT_TTL_S), PromptPin(0.0, 0), PromptPin(DEFAULT_TTL_S, 32))


@pytest.mark.parametrize(
    ("wire", "grammar"),
    [
        (None, None),
        (pb.ResponseFormat(json_object=pb.JsonObject()), Grammar("json_object")),
        (pb.ResponseFormat(json_schema="{}"), Grammar("json_schema", "{}")),
        (pb.ResponseFormat(json_schema=""), Grammar("json_schema", "")),
        (pb.ResponseFormat(regex="a+"), Grammar("regex", "a+")),
        (pb.ResponseFormat(lark="start: /a/"), Grammar("lark", "start: /a/")),
    ],
)
def test_each_response_format_is_a_grammar(wire: pb.ResponseFormat | None, grammar: Grammar | None) -> None:
    assert asked(text="x", response_format=wire).sampling.grammar == grammar


def test_a_response_format_without_one_is_named() -> None:
    with pytest.raises(InvalidRequest, match="response_format: one of json_object, json_schema"):
        asked(text="x", response_format=pb.ResponseFormat())


def test_every_field_of_a_request_is_translated() -> None:
    """One that is added to the .proto and forgotten here would do nothing, silently."""
    known = {"model", "text", "token_ids", "chat", "sampling", "cache_salt", "cache_key", "request_id", "n"}
    known |= {"priority", "tenant", "pins", "response_format"}
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == known
    known -= {"sampling", "request_id", "n", "priority", "response_format", "pins"}
    assert {field.name for field in pb.PrewarmRequest.DESCRIPTOR.fields} == known | {"workers", "ttl_s"}
    request = prewarm_request(
        pb.PrewarmRequest(text="x", cache_key="k", cache_salt="s", tenant="t", model="m")
    )
    assert (request.cache_key, request.cache_salt, request.tenant, request.model) == ("k", "s", "t", "m")


def test_tool_calls_and_the_stop_string_come_back() -> None:
    calls = (ToolCallDelta(0, "c1", "sum"), ToolCallDelta(1, arguments="{}"))
    (response,) = generate_responses(Delta("", (1, 2), 3, tool_calls=calls))
    assert response.delta == pb.Delta(
        token_ids=[1, 2],
        choice=3,
        tool_calls=[
            pb.ToolCallDelta(index=0, id="c1", name="sum"),
            pb.ToolCallDelta(index=1, arguments="{}"),
        ],
    )
    (response,) = generate_responses(Finished("tool_calls", None, 1))
    assert response.finished == pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, choice=1)
    (response,) = generate_responses(Finished("stop", None, 1, "END"))
    assert response.finished == pb.Finished(reason=pb.FINISH_REASON_STOP, choice=1, stop="END")


def test_what_was_kept_comes_back() -> None:
    usage = Usage(9, 1, kept=(KeptPrefix(8, 60.0, False),), not_kept="over_budget", worker_id="w1")
    kept = [pb.KeptPrefix(tokens=8, ttl_s=60.0, kept=False)]
    (response,) = generate_responses(Finished("stop", usage))
    assert list(response.finished.usage.kept) == kept
    assert response.finished.usage.not_kept == "over_budget"
    (worker,) = prewarm_response([usage]).workers
    assert worker == pb.Prewarmed(worker_id="w1", kept=False, not_kept="over_budget")


def test_a_long_prompts_log_probabilities_come_in_messages_that_any_client_takes() -> None:
    position = TokenLogprobs(-1.5, tuple((10**6 + i, -0.5) for i in range(MAX_LOGPROBS)))
    event = Delta("", prompt_logprobs=(position,) * 3_000)
    responses = list(generate_responses(event))
    assert max(response.ByteSize() for response in responses) < CLIENTS_TAKE // 8
    assert [len(r.delta.prompt_logprobs) for r in responses[:-1]] == [MAX_POSITIONS] * (len(responses) - 1)
    assert sum(len(response.delta.prompt_logprobs) for response in responses) == 3_000
