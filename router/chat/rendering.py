"""A conversation as text, by the model's chat template; with tools, whether it knows them or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatMessage, Tool, ToolCall
from kvhive.router.chat.template import ChatTemplate
from kvhive.router.chat.tool_prompts import (
    spelled_calls,
    spelled_tools,
    tools_as_text,
    with_short_ids,
    without_tools,
)

_PROBE = "kvhive-probe"


class ChatRenderer:
    """One model's. Thread-safe.

    A template that reads `tools` gets tools, calls and answers as transformers hands them on. For another
    one they become text: tools are told in the system message, before what else it says.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], timeout_s: float) -> None:
        """Compile the template. Raises ModelError."""
        self._template = ChatTemplate(source, special_tokens, timeout_s)
        self._knows_tools = "tools" in self._template.variables
        self._wants_short_ids = self._knows_tools and self._refuses_long_ids()
        self._knows_system = self._knows_tools or self._shows("system", "user")
        self.drops_thoughts = not self._shows_thoughts()
        """Whether it leaves out what earlier turns thought, between <think> and </think>."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """Return the text, ready for the assistant's turn.

        Raises InvalidRequest when the template refuses it, or parameters are no JSON object.
        """
        if tools or bool([m for m in messages if m.tool_calls or m.role == "tool"]):
            if self._knows_tools:
                if self._wants_short_ids:
                    messages = [with_short_ids(message) for message in messages]
                spelled = [_spelled(message) for message in messages]
                return self._template.render(spelled, spelled_tools(tools) or None)
            messages = without_tools(messages)
            if tools:
                messages = self._told(messages, tools_as_text(tools))
        return self._template.render([{"role": m.role, "content": m.content} for m in messages])

    def _told(self, messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
        """Put a text before everything: into the system message or, without one, the first one."""
        first, *rest = messages
        if first.role == "system" or not self._knows_system:
            return [replace(first, content=f"{text}\n\n{first.content}"), *rest]
        return [ChatMessage("system", text), *messages]

    def _refuses_long_ids(self) -> bool:
        """Whether calls need ids of nine letters and digits, as Mistral's models were taught."""
        accepted = []
        for name in ("callcall1", "call_0123456789"):
            calls = [
                ChatMessage("assistant", "", (ToolCall(name, "f", "{}"),)),
                ChatMessage("tool", "x", (), name),
            ]
            try:
                self._template.render([_spelled(m) for m in (ChatMessage("user", "a"), *calls)])
            except InvalidRequest:
                accepted.append(False)
            else:
                accepted.append(True)
        return accepted == [True, False]

    def _shows(self, *roles: str) -> bool:
        try:
            text = self._template.render(
                [{"role": role, "content": f"{_PROBE} {index}"} for index, role in enumerate(roles)]
            )
        except InvalidRequest:
            return False
        return all(f"{_PROBE} {index}" in text for index in range(len(roles)))

    def _shows_thoughts(self) -> bool:
        thought = f"<think>\n{_PROBE}\n</think>\n\nso"
        said = [("user", "a"), ("assistant", thought), ("user", "b")]
        try:
            return _PROBE in self._template.render([{"role": role, "content": text} for role, text in said])
        except InvalidRequest:
            return True


def _spelled(message: ChatMessage) -> dict[str, object]:
    spelled: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        spelled["tool_calls"] = spelled_calls(message.tool_calls)
    if message.role == "tool":
        spelled["tool_call_id"] = message.tool_call_id
    return spelled
