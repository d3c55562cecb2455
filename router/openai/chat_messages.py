"""The messages of a chat, and the cache breakpoints among their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import MAX_MESSAGES, ChatMessage, ToolCall
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.field_policy import IGNORED_IN_MESSAGES, GivenFields, refuse_others
from kvhive.router.openai.prompt_cache import Marker, read_marker

_FIELDS = IGNORED_IN_MESSAGES | {"role", "content", "tool_calls", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class MarkedMessages:
    """A conversation, and where its parts say that a cached prefix is to end."""

    messages: tuple[ChatMessage, ...]
    markers: tuple[Marker, ...]
    """In the order of the prompt."""


def read_messages(given: GivenFields) -> MarkedMessages:
    """Return the messages. Raises InvalidRequest."""
    if "messages" not in given:
        raise InvalidRequest("messages", "is required")
    listed: list[Any] = typed(given, "messages", list, [])
    if len(listed) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be at most {MAX_MESSAGES} messages, is {len(listed)}")
    markers: list[Marker] = []
    messages = tuple(_message(given, index, message, markers) for index, message in enumerate(listed))
    return MarkedMessages(messages, tuple(markers))


def _message(given: GivenFields, index: int, message: object, markers: list[Marker]) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(message)}")
    refuse_others(where, message, _FIELDS)
    for name in IGNORED_IN_MESSAGES:
        if message.get(name) not in (None, [], {}, ""):
            given.ignore(f"messages.{name}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role", f"must be a string, is {json_type(role)}")
    calls = _calls(where, message)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = _joined(index, content, markers)
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content", f"must be a string or an array of text parts, is {json_type(content)}"
        )
    return ChatMessage(
        "system" if role == "developer" else role, content, calls, _call_id(where, role, message)
    )


def _call_id(where: str, role: str, message: Mapping[str, Any]) -> str:
    call_id = message.get("tool_call_id")
    if call_id is None and role != "tool":
        return ""
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{where}.tool_call_id", f"must be a string, is {json_type(call_id)}")
    return call_id


def _calls(where: str, message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls", f"must be an array, is {json_type(calls)}")
    return tuple(_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls))


def _call(where: str, call: object) -> ToolCall:
    if not isinstance(call, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(call)}")
    refuse_others(where, call, frozenset({"id", "type", "function", "index"}))
    kind, function = call.get("type"), call.get("function")
    if kind not in (None, "function"):
        shown = spell_text(kind) if isinstance(kind, str) else json_type(kind)
        raise InvalidRequest(f"{where}.type", f"must be 'function', is {shown}")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function", f"must be an object, is {json_type(function)}")
    refuse_others(f"{where}.function", function, frozenset({"name", "arguments"}))
    texts = []
    for held, name, path in (
        (call, "id", "id"),
        (function, "name", "function.name"),
        (function, "arguments", "function.arguments"),
    ):
        text = held.get(name)
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.{path}", f"must be a string, is {json_type(text)}")
        texts.append(text)
    return ToolCall(*texts)


def _joined(message: int, parts: Sequence[object], markers: list[Marker]) -> str:
    """Join the parts with nothing between them: the caller wrote nothing there."""
    texts: list[str] = []
    chars = 0
    for index, part in enumerate(parts):
        where = f"messages[{message}].content[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(where, f"must be an object, is {json_type(part)}")
        text = _part_text(where, part)
        texts.append(text)
        chars += len(text)
        marker = part.get("prompt_cache_breakpoint")
        if marker is not None:
            whole = index == len(parts) - 1
            markers.append(
                read_marker(f"{where}.prompt_cache_breakpoint", marker, message, None if whole else chars)
            )
    return "".join(texts)


def _part_text(where: str, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        shown = spell_text(kind) if isinstance(kind, str) else json_type(kind)
        raise InvalidRequest(f"{where}.type", f"must be 'text', is {shown}")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text", f"must be a string, is {json_type(text)}")
    refuse_others(where, part, frozenset({"type", "text", "prompt_cache_breakpoint"}))
    return text
