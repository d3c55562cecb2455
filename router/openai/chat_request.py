"""The body of POST /v1/chat/completions, turned into the internal request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.fields import (
    SPELLINGS,
    CompletionRequest,
    generate_request,
    given_fields,
    sampling_fields,
    stream_fields,
)
from kvhive.router.sampling_params import check_logprobs

_SUPPORTED = {"messages", "max_completion_tokens", "top_logprobs"}
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
_IGNORED_IN_MESSAGES = {"name", "refusal", "annotations"}


def parse_chat_completion(body: dict[str, Any], request_id: str) -> CompletionRequest:
    """Read a parsed JSON body. Raises InvalidRequest naming the field, what it must be and what it is."""
    given = given_fields(body, _SUPPORTED, _NEUTRAL)
    stream, include_usage = stream_fields(given)
    prompt = ChatPrompt(_messages(given))
    sampling = sampling_fields(given, _max_tokens(given), _logprobs(given))
    request = generate_request(given, prompt, sampling, request_id)
    return CompletionRequest((request,), stream, include_usage, spell=_spelling)


def _spelling(prompt: int, field: str) -> str:
    return {"prompt": "messages", **SPELLINGS}.get(field, field)


def _messages(given: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    if "messages" not in given:
        raise InvalidRequest("messages", "is required")
    return tuple(
        _message(f"messages[{index}]", message)
        for index, message in enumerate(typed(given, "messages", list, []))
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


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    old: int | None = typed(given, "max_tokens", int, None)
    new: int | None = typed(given, "max_completion_tokens", int, None)
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_completion_tokens", "must equal max_tokens where both are given")
    return old if new is None else new


def _logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = typed(given, "logprobs", bool, False)
    top: int = typed(given, "top_logprobs", int, 0)
    check_logprobs("top_logprobs", top)
    if top and not wanted:
        raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
    return top if wanted else None
