"""Tools, calls and answers as chat templates read them; and as text, for templates that know of none.

Whatever order of keys a client sends, a tool's text is the same: its own keys have one order, those of its
parameters are sorted. So equal tools give equal blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.strict_json import json_object
from kvhive.router.chat.messages import NO_PARAMETERS, ChatMessage, Tool, ToolCall

SHORT_ID_CHARS = 9


def spelled_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Return tools as templates read them. Raises InvalidRequest for parameters that are no JSON object."""
    return [_spelled(f"tools[{index}].parameters", tool) for index, tool in enumerate(tools)]


def spelled_calls(calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    """Return calls as templates read them; arguments that are no JSON object stay the text that they are."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call_arguments(call)},
        }
        for call in calls
    ]


def call_arguments(call: ToolCall) -> object:
    """Return a call's arguments as an object, or as text where they are none.

    They are not refused: a model may have written them, and they come back with every later turn.
    """
    try:
        return json_object("arguments", call.arguments)
    except InvalidRequest:
        return call.arguments


def tools_as_text(tools: Sequence[Tool]) -> str:
    """Tell a model whose template knows no tools which there are, and how to call them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in spelled_tools(tools))
    return (
        f"You may call functions. They are, one to a line:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write a line of this form, and one for each further call:\n"
        '<tool_call>{"name": "function", "arguments": {"parameter": "value"}}</tool_call>\n'
        "What it returns comes back between <tool_response> and </tool_response>."
    )


def call_as_text(call: ToolCall) -> str:
    """Return a call in the form that `tools_as_text` asks for."""
    said = {"name": call.name, "arguments": call_arguments(call)}
    return f"<tool_call>{json.dumps(said, ensure_ascii=False)}</tool_call>"


def without_tools(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation in which calls are the assistant's text, and what they gave is the user's."""
    plain: list[ChatMessage] = []
    answered = False
    for message in messages:
        content = message.content
        if message.role == "tool":
            content = f"<tool_response>{content}</tool_response>"
            if answered:  # one turn of the user's, as templates want turns to alternate
                content = f"{plain.pop().content}\n{content}"
            plain.append(ChatMessage("user", content))
        elif message.tool_calls:
            lines = [content] if content else []
            plain.append(
                ChatMessage("assistant", "\n".join([*lines, *map(call_as_text, message.tool_calls)]))
            )
        else:
            plain.append(message)
        answered = message.role == "tool"
    return plain


def with_short_ids(message: ChatMessage) -> ChatMessage:
    """Return a message with ids of nine letters and digits, for templates that refuse others."""
    if not message.tool_calls and not message.tool_call_id:
        return message
    calls = tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls)
    answered = message.tool_call_id and _short_id(message.tool_call_id)
    return replace(message, tool_calls=calls, tool_call_id=answered)


def _short_id(call_id: str) -> str:
    if len(call_id) == SHORT_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:SHORT_ID_CHARS]


def _spelled(field: str, tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    parameters = json_object(field, tool.parameters or NO_PARAMETERS)
    function["parameters"] = json.loads(json.dumps(parameters, sort_keys=True))
    return {"type": "function", "function": function}
