"""Finds calls of tools in an output, as it comes: nothing is lost, nothing is held longer than it must be.

What is no call is text: also a call that breaks off before its arguments begin, names no tool of the
request's, or is not spelled as the model's format has it. From its arguments on, a call is passed on as it
is written; if it breaks off later, it stays as far as it came, and what follows is text. White space beside
a call is the call's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvhive.router.chat.messages import MAX_TOOL_CALLS, Tool
from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import SPACE, Feed, NotACall, Reading
from kvhive.router.chat.tools.form import ToolForm
from kvhive.router.frontend import ToolCallDelta

MAX_HELD_SPACE = 64
"""Characters of white space that may be a call's; more before one is text."""


class ToolCallParser:
    """Reads one output. Feed it text in order, then `finish` once."""

    def __init__(self, form: ToolForm, tools: Mapping[str, Tool], parallel: bool = True) -> None:
        """Prepare; `tools` by their names, of which one call at most is taken unless `parallel`."""
        self._form = form
        self._feed = Feed()
        self._calls = Calls(self._feed, tools, MAX_TOOL_CALLS if parallel else 1)
        self._parallel = parallel
        self._reading: Iterator[None] = self._output()

    @property
    def complete(self) -> int:
        """Calls that came whole."""
        return self._calls.complete

    @property
    def sated(self) -> bool:
        """Whether the one call that there may be has come."""
        return not self._parallel and self.complete > 0

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Return what is certain now: text, and pieces of calls, in order."""
        if text:
            self._feed.add(text)
            self._advance()
        return self._calls.take()

    def finish(self) -> list[str | ToolCallDelta]:
        """Return the rest: the output has ended."""
        self._feed.ended = True
        self._advance()
        return self._calls.take()

    def _advance(self) -> None:
        try:
            next(self._reading)
        except StopIteration:
            self._reading = iter(())

    def _output(self) -> Reading[None]:
        """Read all there is."""
        openers = self._form.leading + self._form.openers
        while opener := (yield from self._text(openers)):
            yield from self._section(opener)
            openers = self._form.openers

    def _text(self, openers: tuple[str, ...]) -> Reading[str]:
        """Pass text on up to an opener and return that; "" at the end."""
        feed, at_start = self._feed, openers != self._form.openers
        while True:
            rest = feed.text[feed.at :]
            place, opener = _find(rest, self._form.openers, feed.ended)
            if at_start:
                begun = rest.lstrip(SPACE)
                blank = len(rest) - len(begun)
                found = next((each for each in self._form.leading if begun.startswith(each)), "")
                if found and blank <= MAX_HELD_SPACE:
                    place, opener = blank, found
                at_start = not begun and blank <= MAX_HELD_SPACE
            text = rest[:place]
            blank = len(text) - len(text.rstrip(SPACE))
            if opener or not feed.ended:
                place -= min(blank, MAX_HELD_SPACE)
            self._calls.text(rest[:place])
            feed.at += place
            if opener or feed.ended:
                return opener
            yield

    def _section(self, opener: str) -> Reading[None]:
        """Read calls, the white space beside them, and what it takes to see that there are no more."""
        feed, calls = self._feed, self._calls
        before = calls.begun
        feed.keep()
        yield from feed.space()
        space = feed.kept()
        calls.hold()
        try:
            yield from self._form.read(calls)
            calls.settle()
        except NotACall:
            if calls.let_go() and calls.begun == before:
                calls.text(space + opener)
                feed.at += len(opener)
                return
        yield from feed.space()


def _find(text: str, openers: tuple[str, ...], ended: bool) -> tuple[int, str]:
    """Return where the first opener is, and which; or "" and where one may have begun."""
    found = [(place, opener) for opener in openers if (place := text.find(opener)) >= 0]
    if found:
        return min(found)
    begun = len(text)
    for opener in () if ended else openers:
        for length in range(min(len(opener) - 1, len(text)), len(text) - begun, -1):
            if text.endswith(opener[:length]):
                begun = len(text) - length
                break
    return begun, ""
