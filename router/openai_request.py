"""The body of POST /v1/chat/completions, turned into the internal request.

Strict: "5" is not a number, and a field that would change the answer but is not supported is refused by
name, never ignored. What a caller's SDK sends without consequence here is listed and ignored. Limits are
checked behind this door, by `validate_request`, as for gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.request import ChatMessage, ChatPrompt, GenerateRequest
from kvhive.router.sampling_params import SamplingParams, check_logprobs

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, so that its clients find what they know; over gRPC the default is 0."""

_SUPPORTED = {
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "prompt_cache_key",
    "n",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "typical_p",
    "min_tokens",
    "priority",
}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not supported, with the values that ask for nothing."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_IGNORED_IN_MESSAGES = {"name", "refusal", "annotations"}


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """One parsed body: the internal request, and how the answer is to be shaped."""

    request: GenerateRequest
    stream: bool
    include_usage: bool


def parse_chat_completion(body: dict[str, Any], request_id: str) -> ChatCompletionRequest:
    """Read a parsed JSON body. Raises InvalidRequest naming the field, what it must be and what it is."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(given)
    stream = bool(_typed(given, "stream", bool, False))
    return ChatCompletionRequest(
        request=GenerateRequest(
            prompt=ChatPrompt(_messages(given)),
            sampling=_sampling(given),
            model=_typed(given, "model", str, ""),
            cache_salt=_typed(given, "cache_salt", str, ""),
            cache_key=_typed(given, "prompt_cache_key", str, ""),
            request_id=request_id,
            n=_typed(given, "n", int, 1),
            priority=_typed(given, "priority", int, 0),
        ),
        stream=stream,
        include_usage=_include_usage(given, stream),
    )


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _SUPPORTED or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            shown = ascii(name[:64])[1:-1]
            raise InvalidRequest(shown, "is not supported")
        # A boolean equals a number in Python but not in JSON.
        neutral = _NEUTRAL[name]
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            only = " or ".join(repr(n) for n in neutral)
            raise InvalidRequest(name, f"is not supported, other than {only}")


def _messages(given: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    if "messages" not in given:
        raise InvalidRequest("messages", "is required")
    return tuple(
        _message(f"messages[{index}]", message)
        for index, message in enumerate(_typed(given, "messages", list, []))
    )


def _message(where: str, message: object) -> ChatMessage:
    if not isinstance(message, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(message)}")
    for name, value in message.items():
        if name not in {"role", "content"} | _IGNORED_IN_MESSAGES and value not in (None, [], {}, ""):
            raise InvalidRequest(f"{where}.{ascii(name[:64])[1:-1]}", "is not supported")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role", f"must be a string, is {json_type(role)}")
    if isinstance(content, list):
        # Nothing between the parts: the caller wrote nothing there.
        content = "".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content", f"must be a string or an array of text parts, is {json_type(content)}"
        )
    return ChatMessage(role, content)


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(part)}")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        shown = ascii(kind[:64]) if isinstance(kind, str) else json_type(kind)
        raise InvalidRequest(f"{where}.type", f"must be 'text', is {shown}")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text", f"must be a string, is {json_type(text)}")
    for name in part:
        if name not in {"type", "text"}:
            raise InvalidRequest(f"{where}.{ascii(name[:64])[1:-1]}", "is not supported")
    return text


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=_max_tokens(given),
        temperature=_number(given, "temperature", DEFAULT_TEMPERATURE),
        top_k=_typed(given, "top_k", int, 0),
        top_p=_number(given, "top_p", 1.0),
        min_p=_number(given, "min_p", 0.0),
        seed=_typed(given, "seed", int, None),
        stop=_stops(given),
        stop_token_ids=_items(given, "stop_token_ids", int),
        ignore_eos=_typed(given, "ignore_eos", bool, False),
        typical_p=_number(given, "typical_p", 1.0),
        repetition_penalty=_number(given, "repetition_penalty", 1.0),
        frequency_penalty=_number(given, "frequency_penalty", 0.0),
        presence_penalty=_number(given, "presence_penalty", 0.0),
        logit_bias=_logit_bias(given),
        min_tokens=_typed(given, "min_tokens", int, 0),
        logprobs=_logprobs(given),
    )


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    old: int | None = _typed(given, "max_tokens", int, None)
    new: int | None = _typed(given, "max_completion_tokens", int, None)
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_completion_tokens", "must equal max_tokens where both are given")
    return old if new is None else new


def _logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = _typed(given, "logprobs", bool, False)
    top: int = _typed(given, "top_logprobs", int, 0)
    check_logprobs("top_logprobs", top)
    if top and not wanted:
        raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
    return top if wanted else None


def _logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    entries: dict[str, Any] = _typed(given, "logit_bias", dict, {})
    for key, bias in entries.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("logit_bias", f"keys must be token ids, one is {spell_text(key)}")
        _number({f"logit_bias[{key}]": bias}, f"logit_bias[{key}]", 0.0)
    return tuple(sorted((int(key), bias) for key, bias in entries.items()))


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(given.get("stop"), str):
        return (given["stop"],)
    return _items(given, "stop", str)


def _items(given: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values: list[Any] = _typed(given, name, list, [])
    for index, value in enumerate(values):
        _typed({f"{name}[{index}]": value}, f"{name}[{index}]", kind, None)
    return tuple(values)


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options: dict[str, Any] = _typed(given, "stream_options", dict, {})
    if options and not stream:
        raise InvalidRequest("stream_options", "is only allowed with stream: true")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest("stream_options.include_usage", f"must be a boolean, is {json_type(value)}")
    return bool(value)


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"must be a number, is {json_type(value)}")
    return value


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of exactly this JSON type, or the default. Raises InvalidRequest."""
    if name not in given:
        return default
    value = given[name]
    if type(value) is not kind:
        wanted = {bool: "a boolean", int: "an integer", str: "a string", list: "an array", dict: "an object"}
        raise InvalidRequest(name, f"must be {wanted[kind]}, is {json_type(value)}")
    return value
