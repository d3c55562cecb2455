"""Messages of kvhive.v1 as the router's own requests: spellings only, what is allowed is decided there.

A field that was not sent takes its default here; one that was sent as 0 stays 0, and may be an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.chat.messages import (
    NO_PARAMETERS,
    CacheBreakpoint,
    ChatMessage,
    ChatPrompt,
    Tool,
    ToolCall,
    ToolChoice,
)
from kvhive.router.prewarm import keeping
from kvhive.router.request import GenerateRequest, Prompt, PromptPin, TextPrompt, TokenPrompt
from kvhive.router.sampling_params import Grammar, SamplingParams

DEFAULT_TTL_S = 300.0
"""Of a pin or a breakpoint that does not say how long."""

_MODES: dict[int, Literal["auto", "none", "required"]] = {
    pb.ToolChoice.AUTO: "auto",
    pb.ToolChoice.NONE: "none",
    pb.ToolChoice.REQUIRED: "required",
}


def generate_request(wire: pb.GenerateRequest, timeout_s: float | None) -> GenerateRequest:
    """Translate a generation that is waited for so many seconds. Raises InvalidRequest."""
    return GenerateRequest(
        prompt=prompt(wire),
        sampling=_sampling(wire),
        model=wire.model,
        cache_salt=wire.cache_salt,
        cache_key=wire.cache_key,
        request_id=wire.request_id,
        n=wire.n if wire.HasField("n") else 1,
        priority=wire.priority,
        tenant=wire.tenant,
        pins=tuple(map(_pin, wire.pins)),
        timeout_s=timeout_s,
    )


def prewarm_request(wire: pb.PrewarmRequest) -> GenerateRequest:
    """Translate what is to be prewarmed. Raises InvalidRequest."""
    request = GenerateRequest(
        prompt=prompt(wire),
        model=wire.model,
        cache_salt=wire.cache_salt,
        cache_key=wire.cache_key,
        tenant=wire.tenant,
    )
    return keeping(request, wire.ttl_s) if wire.HasField("ttl_s") else request


def prompt(wire: pb.GenerateRequest | pb.TokenizeRequest | pb.PrewarmRequest) -> Prompt:
    """Translate what there is to continue. Raises InvalidRequest."""
    match wire.WhichOneof("input"):
        case "text":
            return TextPrompt(wire.text)
        case "token_ids":
            assert not isinstance(wire, pb.TokenizeRequest)
            return TokenPrompt(tuple(wire.token_ids.ids))
        case "chat":
            return _chat(wire.chat)
        case _:
            raise InvalidRequest("input", "one of text, token_ids and chat must be set, none is")


def _chat(wire: pb.Chat) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(map(_message, wire.messages)),
        tools=tuple(
            Tool(tool.name, tool.description, tool.parameters or NO_PARAMETERS) for tool in wire.tools
        ),
        tool_choice=_tool_choice(wire.tool_choice),
        breakpoints=tuple(_breakpoints(wire)),
    )


def _message(wire: pb.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in wire.tool_calls)
    return ChatMessage(wire.role, wire.content, calls, wire.tool_call_id)


def _tool_choice(wire: pb.ToolChoice) -> ToolChoice:
    if wire.mode not in _MODES:
        modes = ", ".join(pb.ToolChoice.Mode.keys())
        raise InvalidRequest("tool_choice.mode", f"must be one of {modes}, is {wire.mode}")
    mode = _MODES[wire.mode]
    if wire.name and mode != "required":
        raise InvalidRequest(
            "tool_choice.name", f"must be given with REQUIRED alone, the mode is {mode.upper()}"
        )
    return ToolChoice(mode, wire.name, wire.parallel if wire.HasField("parallel") else True)


def _breakpoints(wire: pb.Chat) -> Iterable[CacheBreakpoint]:
    """Yield where the cache is to last, in the order of the prompt: tools stand before all messages."""
    for tool in wire.tools:
        if tool.HasField("cache_control"):
            yield CacheBreakpoint(_ttl_s(tool.cache_control))
    for index, message in enumerate(wire.messages):
        if message.HasField("cache_control"):
            yield CacheBreakpoint(_ttl_s(message.cache_control), index)


def _pin(wire: pb.Pin) -> PromptPin:
    return PromptPin(_ttl_s(wire), wire.tokens if wire.HasField("tokens") else None)


def _ttl_s(wire: pb.Pin | pb.CacheControl) -> float:
    return wire.ttl_s if wire.HasField("ttl_s") else DEFAULT_TTL_S


def _grammar(wire: pb.ResponseFormat) -> Grammar:
    match wire.WhichOneof("format"):
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            return Grammar("json_schema", wire.json_schema)
        case "regex":
            return Grammar("regex", wire.regex)
        case "lark":
            return Grammar("lark", wire.lark)
        case _:
            raise InvalidRequest(
                "response_format", "one of json_object, json_schema, regex and lark must be set, none is"
            )


def _sampling(request: pb.GenerateRequest) -> SamplingParams:
    wire = request.sampling

    def given(name: str, default: Any) -> Any:
        return getattr(wire, name) if wire.HasField(name) else default

    return SamplingParams(
        max_tokens=given("max_tokens", None),
        temperature=given("temperature", 0.0),
        top_k=given("top_k", 0),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        seed=given("seed", None),
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=given("ignore_eos", False),
        typical_p=given("typical_p", 1.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        presence_penalty=given("presence_penalty", 0.0),
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        min_tokens=given("min_tokens", 0),
        logprobs=given("logprobs", None),
        prompt_logprobs=given("prompt_logprobs", None),
        grammar=_grammar(request.response_format) if request.HasField("response_format") else None,
        speculate=given("speculate", True),
    )
