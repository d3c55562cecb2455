"""Control tokens that somebody types: in a message, or in a tool, they are text.

A conversation becomes one text, in which the template's own control tokens are found by their spelling. So
what was spelled like one before is exchanged for a mark, and told apart from the template's afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvhive.router.chat.marks import Marks
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool, ToolCall

MOST_OPENERS, LONGEST_OPENER_CHARS = 12, 5
"""More of them, and one search for all spellings is as fast."""


@dataclass(frozen=True, slots=True)
class Typed:
    """Text in which nothing is a control token."""

    text: str
    behind: bool = False
    """Whether it is to be tokenised as what stands behind other text."""


class ControlTokens:
    """The spellings of one vocabulary's control tokens."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = tuple(sorted(filter(None, spellings), key=lambda text: (-len(text), text)))
        self._numbers = {text: number for number, text in enumerate(self._spellings)}
        self._openers = _openers(self._spellings)
        self._pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")

    def typed_in(self, text: str) -> bool:
        """Whether a text spells one. A text without even the beginning of any costs next to nothing."""
        for opener in self._openers:
            if opener in text:
                return self._pattern.search(text) is not None
        return False

    def typed_in_chat(self, prompt: ChatPrompt) -> bool:
        """Whether anything that a caller says in a conversation spells one."""
        said = [message.content for message in prompt.messages]
        for message in prompt.messages:
            if message.tool_calls or message.tool_call_id:
                said.append(message.tool_call_id)
                for call in message.tool_calls:
                    said += call.id, call.name, _unescaped(call.arguments)
        for tool in prompt.tools:
            said += tool.name, tool.description, _unescaped(tool.parameters)
        return self.typed_in("\n".join(said))

    def hidden(self, text: str, marks: Marks, points: Sequence[tuple[int, str]] = ()) -> str:
        """Exchange what is spelled like one for a mark, and put other marks after so many characters.

        Where that is inside such a spelling, they come before it.
        """
        if not points and not self.typed_in(text):
            return text
        typed = [
            (*found.span(), marks.control(self._numbers[found[0]])) for found in self._pattern.finditer(text)
        ]
        places = list(typed)
        for chars, mark in points:
            inside = next((begin for begin, end, _ in typed if begin < chars < end), chars)
            places.append((inside, inside, mark))
        pieces, start = list[str](), 0
        for begin, end, mark in sorted(places):
            pieces += [text[start:begin], mark]
            start = end
        return "".join([*pieces, text[start:]])

    def hidden_in(self, message: ChatMessage, marks: Marks) -> ChatMessage:
        """Do so in all of a message but its content."""
        if not message.tool_calls and not message.tool_call_id:
            return message
        calls = [
            ToolCall(
                self.hidden(c.id, marks), self.hidden(c.name, marks), self._hidden_json(c.arguments, marks)
            )
            for c in message.tool_calls
        ]
        return replace(
            message, tool_calls=tuple(calls), tool_call_id=self.hidden(message.tool_call_id, marks)
        )

    def hidden_in_tools(self, tools: Sequence[Tool], marks: Marks) -> tuple[Tool, ...]:
        """Do so in tools."""
        return tuple(
            Tool(
                self.hidden(tool.name, marks),
                self.hidden(tool.description, marks),
                self._hidden_json(tool.parameters, marks),
            )
            for tool in tools
        )

    def spelled_again(self, text: str, marks: Marks) -> str:
        """Return a text in which typed ones are no marks any more."""
        return marks.replaced(text, self._spellings.__getitem__)

    def apart(self, text: str, marks: Marks) -> list[tuple[int, str | Typed]]:
        """Cut a rendered text into what is as it seems, and the text around marks, in which they are undone.

        Such a part reaches from one control token of the template's to the next. Each comes with where it
        begins.
        """
        if not marks.controls_in(text):
            return [(0, text)] if text else []
        pieces: list[tuple[int, str | Typed]] = []
        whole = start = 0
        for begin, end in [*(found.span() for found in self._pattern.finditer(text)), (len(text), len(text))]:
            typed = self.spelled_again(text[start:begin], marks)
            if typed != text[start:begin]:
                pieces += [(whole, text[whole:start]), (start, Typed(typed))]
                whole = begin
            start = end
        return [(place, piece) for place, piece in [*pieces, (whole, text[whole:])] if piece]

    def _hidden_json(self, text: str, marks: Marks) -> str:
        plain = _unescaped(text)
        return self.hidden(plain, marks) if self.typed_in(plain) else text


def _openers(spellings: Sequence[str]) -> tuple[str, ...]:
    """Return what each of them begins with, in few and long enough pieces to be looked for one by one."""
    for chars in range(LONGEST_OPENER_CHARS, 1, -1):
        found = {text[:chars] for text in spellings}
        if len(found) <= MOST_OPENERS:
            return tuple(sorted(found))
    return tuple(sorted({text[0] for text in spellings}))


def _unescaped(text: str) -> str:
    """Return JSON text as templates spell it: without escapes where none is needed."""
    if "\\" not in text:
        return text
    try:
        plain = json.dumps(json.loads(text), ensure_ascii=False)
        plain.encode()  # which fails for half of a surrogate pair
        return plain
    except (ValueError, RecursionError):
        return text  # no template reads it, or it is refused
