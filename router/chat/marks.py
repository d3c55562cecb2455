"""Marks in a conversation that is to be rendered: text that nobody can have typed, since it is new each time.

They are letters and digits only, so that templates, JSON and trimming leave them as they are.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator

_ANY = re.compile(r"(kv[0-9a-f]{16})([tcp])([0-9]{6})")
"""No two of them overlap, whoever wrote them."""
_CHARS = 25


class Marks:
    """Of one conversation. A mark has a kind, a letter, and a number."""

    def __init__(self) -> None:
        self._secret = "kv" + secrets.token_hex(8)

    def turn(self, message: int) -> str:
        """Stand for what the assistant said in this message."""
        return f"{self._secret}t{message:06}"

    def control(self, number: int) -> str:
        """Stand for a typed control token."""
        return f"{self._secret}c{number:06}"

    def point(self, number: int) -> str:
        """Stand for nothing, at a place that is looked for."""
        return f"{self._secret}p{number:06}"

    def controls_in(self, text: str) -> bool:
        """Whether a text has marks of control tokens."""
        return f"{self._secret}c" in text

    def turns(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, message) of the turns in a text."""
        for found in _ANY.finditer(text):
            if found[1] == self._secret and found[2] == "t":
                yield found.start(), found.end(), int(found[3])

    def places(self, text: str, marked: str) -> dict[int, int]:
        """Return where in a text the points are which that text, rendered again, has.

        As far as both are equal otherwise: behind the first difference no place is known but that one.
        """
        kept, places = list[str](), dict[int, int]()
        length = start = 0
        for found in _ANY.finditer(marked):
            if found[1] == self._secret and found[2] == "p":
                kept.append(marked[start : found.start()])
                length += len(kept[-1])
                start = found.end()
                places.setdefault(int(found[3]), length)
        same = _common_chars(text, "".join([*kept, marked[start:]]))
        return {number: min(place, same) for number, place in places.items()}

    def replaced(self, text: str, spell: Callable[[int], str]) -> str:
        """Return a text with its control tokens spelled again."""
        if not self.controls_in(text):
            return text
        return _ANY.sub(
            lambda found: spell(int(found[3])) if found[1] == self._secret and found[2] == "c" else found[0],
            text,
        )

    def before(self, text: str, end: int) -> int:
        """Return the end, or where the mark begins that it would cut in two."""
        near = _ANY.finditer(text, max(0, end - _CHARS), end + _CHARS)
        return next((found.start() for found in near if found.start() < end < found.end()), end)


def _common_chars(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
