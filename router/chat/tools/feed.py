"""Text that comes in pieces, read as if it were all there.

A reader is a generator that yields where the text is not known yet. What it decides depends on characters
alone, never on where a piece ended: however an output is cut, the same comes of it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Yields when it needs more text; returns what it read."""

SPACE = " \t\r\n"


class NotACall(Exception):
    """What was read cannot be a call, or cannot go on as one."""


class Feed:
    """The text so far and the place where reading goes on. What was read and is not kept is dropped."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        """Whether nothing more will come."""
        self._kept: list[int] = []

    def add(self, text: str) -> None:
        """Take in more text."""
        done = min([self.at, *self._kept])
        self.text = self.text[done:] + text
        self.at -= done
        self._kept = [place - done for place in self._kept]

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def literal(self, word: str) -> Reading[None]:
        """Read a word. Raises NotACall at the first character that is another one."""
        for character in word:
            if (yield from self.peek()) != character:
                raise NotACall
            self.at += 1

    def optional(self, word: str) -> Reading[bool]:
        """Read a word if it stands here; tell whether it did."""
        self.keep()
        try:
            yield from self.literal(word)
        except NotACall:
            self.back()
            return False
        self.kept()
        return True

    def closing(self, word: str) -> Reading[bool]:
        """Read a word if it stands here, or what there is of it where the output breaks off; tell whether."""
        self.keep()
        for character in word:
            found = yield from self.peek()
            if not found:
                break
            if found != character:
                self.back()
                return False
            self.at += 1
        self.kept()
        return True

    def space(self) -> Reading[None]:
        """Read white space, if there is any."""
        while character := (yield from self.peek()):
            if character not in SPACE:
                return
            self.at += 1

    def until(self, end: str, most: int) -> Reading[str]:
        """Read up to and past `end`; return what came before it. Raises NotACall after `most` characters."""
        self.keep()
        try:
            while True:
                begun = self._kept[-1]
                found = self.text.find(end, max(begun, self.at - len(end) + 1))
                if found >= 0 and found - begun <= most:
                    self.at = found + len(end)
                    return self.text[begun:found]
                if len(self.text) - begun > most + len(end) or self.ended:
                    self.at = begun
                    raise NotACall
                self.at = len(self.text)
                yield
        finally:
            self._kept.pop()

    def keep(self) -> int:
        """Keep what is read from here on, until `back` or `kept` answers this call; return its number."""
        self._kept.append(self.at)
        return len(self._kept) - 1

    def back(self) -> None:
        """Go back to where the last `keep` was."""
        self.at = self._kept.pop()

    def kept(self) -> str:
        """Return what was read since the last `keep`."""
        return self.text[self._kept.pop() : self.at]

    @property
    def kept_chars(self) -> int:
        """How many characters were read since the last `keep`."""
        return self.at - self._kept[-1]

    def kept_so_far(self, number: int) -> str:
        """Return what was read since a `keep`, or since this was last asked of it; go on keeping."""
        text = self.text[self._kept[number] : self.at]
        self._kept[number] = self.at
        return text
