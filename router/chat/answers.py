"""Gathers what a model says in each choice, as its client gets it, until that has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvhive.router.chat.messages import ChatMessage, ToolCall
from kvhive.router.frontend import Delta, Finished, GenerationEvent, ToolCallDelta


@dataclass(slots=True)
class Answer:
    """One choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)
    stop: str = ""
    """The stop string that ended it, if one did."""

    def message(self) -> ChatMessage:
        """Return it as the turn that a client will send back."""
        calls = [
            ToolCall(
                "".join(piece.id for piece in pieces),
                "".join(piece.name for piece in pieces),
                "".join(piece.arguments for piece in pieces),
            )
            for _, pieces in sorted(self.calls.items())
        ]
        return ChatMessage("assistant", "".join(self.text), tuple(calls))


class Answers:
    """Of one request. `ended` is told of each choice, once, when it has ended well."""

    def __init__(self, ended: Callable[[Answer], None]) -> None:
        self._ended = ended
        self._answers: dict[int, Answer] = {}

    def take(self, event: GenerationEvent) -> None:
        """Take in what comes next."""
        if isinstance(event, Delta):
            answer = self._answers.setdefault(event.choice, Answer())
            if event.text:
                answer.text.append(event.text)
            answer.token_ids += event.token_ids
            for piece in event.tool_calls:
                answer.calls.setdefault(piece.index, []).append(piece)
        elif isinstance(event, Finished):
            answer = self._answers.pop(event.choice, Answer())
            answer.stop = event.stop
            self._ended(answer)
