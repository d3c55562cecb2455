"""One choice's output as its reader gets it: text, and the calls of tools that are written in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvhive.router.chat.tools.parser import ToolCallParser
from kvhive.router.frontend import ToolCallDelta
from kvhive.router.output_text import OutputText

Piece = tuple[str, tuple[ToolCallDelta, ...]]
"""Text, then more of calls."""


class ChoiceOutput:
    """Feed it tokens in order, then `finish` once. It outlives the workers that generate it."""

    def __init__(self, text: OutputText, calls: ToolCallParser | None = None) -> None:
        """Prepare; without `calls` all is text."""
        self._text = text
        self._calls = calls
        self._sated = False

    @property
    def token_ids(self) -> list[int]:
        """Every token taken in, up to and including the one that completed the end."""
        return self._text.token_ids

    @property
    def stopped(self) -> bool:
        """Whether it ended before its worker ended it: by a stop string, or by the only call allowed."""
        return self._text.stopped or self._sated

    @property
    def stop(self) -> str:
        """The stop string that ended it, if one did."""
        return self._text.stop

    @property
    def calls_tools(self) -> bool:
        """Whether a whole call came."""
        return self._calls is not None and self._calls.complete > 0

    def push(self, token_ids: Sequence[int]) -> tuple[list[Piece], tuple[int, ...]]:
        """Take in tokens; return what is certain now, in order, and the tokens that count."""
        if self._calls is None:
            text, taken = self._text.push(token_ids)
            return [(text, ())] if text else [], taken
        found: list[str | ToolCallDelta] = []
        counted: list[int] = []
        for token_id in token_ids:  # one by one: what follows the end counts for nothing
            if self.stopped:
                break
            text, taken = self._text.push([token_id])
            counted += taken
            found += self._calls.push(text)
            self._sated = self._calls.sated and self._text.may_end
        return _pieces(found), tuple(counted)

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        text = self._text.finish()
        if self._calls is None:
            return _pieces([text])
        held = [] if self._sated else self._calls.push(text)
        return _pieces(held + self._calls.finish())


def _pieces(found: Iterable[str | ToolCallDelta]) -> list[Piece]:
    """Put what was found together: as few pieces as keep its order."""
    pieces: list[Piece] = []
    for each in found:
        text, calls = pieces[-1] if pieces else ("", ())
        if isinstance(each, ToolCallDelta):
            pieces[-1:] = [(text, (*calls, each))]
        elif each:
            pieces[-1:] = [(text + each, ())] if not calls else [(text, calls), (each, ())]
    return pieces
