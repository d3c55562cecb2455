"""A conversation rendered with marks in it, and where in its text the breakpoints are.

A place is found by rendering once more, with a mark there: whatever a template makes of a conversation, what
stands before the mark is what the model reads before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvhive.router.chat.marks import Marks
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool
from kvhive.router.tokenizer import TextTokenizer

Points = Sequence[tuple[int | None, str]]
"""Marks after so many characters of a message, or (None) at its end."""


class MarkedText:
    """Of one conversation: marks stand for some of its turns, and for control tokens that somebody typed."""

    def __init__(self, tokenizer: TextTokenizer, prompt: ChatPrompt, turns: Collection[int]) -> None:
        """Render. Raises InvalidRequest where the template refuses it."""
        self.marks = Marks()
        self._tokenizer, self._control = tokenizer, tokenizer.control_tokens
        self._prompt, self._turns = prompt, turns
        self._tools = self._control.hidden_in_tools(prompt.tools, self.marks)
        self.text = self._rendered(self._tools, {})

    def breakpoints(self) -> list[int]:
        """Return where in the text each breakpoint of the conversation is."""
        asked = self._prompt.breakpoints
        if not asked:
            return []
        points: dict[int, list[tuple[int | None, str]]] = {}
        for number, point in enumerate(asked):
            if point.message is not None:
                message, chars = self._visible(point.message, point.chars)
                points.setdefault(message, []).append((chars, self.marks.point(number)))
        places = self._places(self._tools, points) if points else {}
        behind_tools = self._behind_tools() if any(point.message is None for point in asked) else 0
        return [
            behind_tools if point.message is None else places.get(number, 0)
            for number, point in enumerate(asked)
        ]

    def _visible(self, message: int, chars: int | None) -> tuple[int, int | None]:
        """Return where a mark can stand: calls are behind the content, and end where the next turn begins."""
        said, last = self._prompt.messages[message], len(self._prompt.messages) - 1
        if chars is None and said.tool_calls and message not in self._turns and message < last:
            return message + 1, 0
        return message, chars

    def _behind_tools(self) -> int:
        """Return where the first message begins that stands behind the tools."""
        last_tool = 0
        if self._tools:
            *others, last = self._tools
            marked = [*others, replace(last, name=last.name + self.marks.point(0))]
            last_tool = self._places(marked, {}).get(0, 0)
        starts = {index: [(0, self.marks.point(index))] for index in range(len(self._prompt.messages))}
        places = self._places(self._tools, starts).values()
        return min((place for place in places if place > last_tool), default=len(self.text))

    def _places(self, tools: Sequence[Tool], points: Mapping[int, Points]) -> dict[int, int]:
        places = self.marks.places(self.text, self._rendered(tools, points))
        return {number: self.marks.before(self.text, place) for number, place in places.items()}

    def _rendered(self, tools: Sequence[Tool], points: Mapping[int, Points]) -> str:
        messages = [
            self._marked(index, message, points.get(index, ()))
            for index, message in enumerate(self._prompt.messages)
        ]
        return self._tokenizer.render_chat(messages, tools)

    def _marked(self, index: int, message: ChatMessage, points: Points) -> ChatMessage:
        content = message.content
        if index in self._turns:
            before = "".join(mark for chars, mark in points if chars is not None)
            after = "".join(mark for chars, mark in points if chars is None)
            return ChatMessage("assistant", f"{before}{self.marks.turn(index)}{after}")
        message = self._control.hidden_in(message, self.marks)
        if not points and not self._control.typed_in(content):
            return message
        # A template that trims does not see the white space at an end that has a mark behind it.
        first, last = len(content) - len(content.lstrip()), len(content.rstrip())
        places = [(min(max(last if c is None else c, first), last), mark) for c, mark in points]
        return replace(message, content=self._control.hidden(content, self.marks, places))
