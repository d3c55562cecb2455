"""A conversation as all doors hand it on: messages, the tools it may call, and where its cache is to last.

Every check is a pure function that raises InvalidRequest naming the field, the limit and the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_PIN_TTL_S, MAX_PINS
from kvhive.router.field_checks import check_above_zero, check_chars, check_text, spell_text

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
"""Rendering is linear in messages; more than this is an error of the caller's, not a conversation."""
MAX_TOOLS = 256
MAX_TOOL_CALLS = 256
"""Of one message."""
MAX_ALL_TOOL_CALLS = 8192
"""Of a conversation: twice as many as it may have messages."""
MAX_TOOL_NAME_CHARS = 128
MAX_CALL_ID_CHARS = 256
_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}")
"""Models write names bare, between marks of their own."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asks of a tool."""

    id: str
    """Names it in the tool's answer."""
    name: str
    arguments: str
    """A JSON object, spelled as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str = ""
    """The call that a tool answers."""


NO_PARAMETERS = '{"type":"object","properties":{}}'
"""Of a tool that does not say what it takes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: str
    """A JSON Schema of its arguments, as JSON: an object."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are to be called, and which."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    """With `required`: the only one that may be called."""
    parallel: bool = True
    """Whether one turn may call several."""


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """The prompt up to here is to stay cached."""

    ttl_s: float
    """After its last use."""
    message: int | None = None
    """It ends in this message; None: after the tools, before the first message that is not theirs."""
    chars: int | None = None
    """... after so many characters of its content; None: after all of it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    """In the order of the prompt."""


def check_chat(prompt: ChatPrompt) -> None:
    """Check a conversation. Raises InvalidRequest."""
    check_messages(prompt.messages)
    _check_tools(prompt)
    _check_breakpoints(prompt)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check messages: 1 to MAX_MESSAGES turns, known roles, well-formed text. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    check_message_count(len(messages))
    check_call_counts(len(message.tool_calls) for message in messages)
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role", f"must be one of {', '.join(ROLES)}, is {spell_text(message.role)}"
            )
        check_text(f"messages[{index}].content", message.content)
        _check_calls(f"messages[{index}]", message)


def check_message_count(count: int) -> None:
    """Check how many messages there are. Raises InvalidRequest."""
    if count > MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be at most {MAX_MESSAGES} messages, is {count}")


def check_call_counts(counts: Iterable[int]) -> None:
    """Check how many calls each message has, and all together. Raises InvalidRequest."""
    total = 0
    for index, count in enumerate(counts):
        total += count
        if count > MAX_TOOL_CALLS:
            raise InvalidRequest(
                f"messages[{index}].tool_calls", f"must be at most {MAX_TOOL_CALLS} calls, is {count}"
            )
    if total > MAX_ALL_TOOL_CALLS:
        raise InvalidRequest("messages", f"must have at most {MAX_ALL_TOOL_CALLS} tool calls, has {total}")


def check_tool_count(count: int) -> None:
    """Check how many tools there are. Raises InvalidRequest."""
    if count > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be at most {MAX_TOOLS} tools, is {count}")


def _check_calls(where: str, message: ChatMessage) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls", f"must be an assistant's, is a {message.role}'s")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest(f"{where}.tool_call_id", f"must be a tool's, is a {message.role}'s")
    for index, call in enumerate(message.tool_calls):
        at = f"{where}.tool_calls[{index}]"
        check_chars(f"{at}.id", call.id, MAX_CALL_ID_CHARS)
        check_chars(f"{at}.name", call.name, MAX_TOOL_NAME_CHARS)
        check_text(f"{at}.arguments", call.arguments)
    check_chars(f"{where}.tool_call_id", message.tool_call_id, MAX_CALL_ID_CHARS)


def _check_tools(prompt: ChatPrompt) -> None:
    tools, choice = prompt.tools, prompt.tool_choice
    check_tool_count(len(tools))
    names = [tool.name for tool in tools]
    for index, tool in enumerate(tools):
        for name, text in (("name", tool.name), ("description", tool.description)):
            check_text(f"tools[{index}].{name}", text)
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"tools[{index}].name",
                f"must be 1 to {MAX_TOOL_NAME_CHARS} letters, digits and any of _ . : / -, "
                f"is {spell_text(tool.name)}",
            )
        if names.index(tool.name) != index:
            raise InvalidRequest(f"tools[{index}].name", f"must be unique, {spell_text(tool.name)} is not")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice", "requires a call, but there are no tools")
    if choice.name and choice.name not in names:
        raise InvalidRequest("tool_choice", f"must name one of the tools, is {spell_text(choice.name)}")


def _check_breakpoints(prompt: ChatPrompt) -> None:
    if len(prompt.breakpoints) > MAX_PINS:
        raise InvalidRequest(
            "cache_control", f"must be at most {MAX_PINS} breakpoints, is {len(prompt.breakpoints)}"
        )
    for point in prompt.breakpoints:
        check_above_zero("cache_control.ttl", point.ttl_s, MAX_PIN_TTL_S)
        if point.message is not None and not 0 <= point.message < len(prompt.messages):
            raise InvalidRequest(
                "cache_control", f"must be in one of {len(prompt.messages)} messages, is in {point.message}"
            )
        if point.message is not None and point.chars is not None:
            most = len(prompt.messages[point.message].content)
            if not 0 <= point.chars <= most:
                raise InvalidRequest(
                    "cache_control",
                    f"must be within the {most} characters of its message, is at {point.chars}",
                )
