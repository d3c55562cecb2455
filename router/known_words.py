"""What words were tokenised to: most words of a text were in another one, and a look takes nanoseconds.

It is for vocabularies whose texts may be cut (text_cuts.py), and knows nothing of them but what it is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kvhive.router.text_cuts import ends_visibly

MAX_WORDS = 100_000
"""20 MB of usual ones, 100 MB of the longest. With more, all are forgotten: those in use soon come back."""
MAX_WORD_CHARS = 128
"""Enough for two words and the markup between two messages."""
MAX_NEW_WORDS = 256
"""Learned of one text, because alone a word takes the library three times as long as in a text."""

Pieces = Sequence[str | bytes]
"""A text in pieces, in order: text that is not known, and the packed ids of what is."""


class KnownWords:
    """Thread-safe."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        assert max_words >= MAX_NEW_WORDS
        self._max_words = max_words
        self._inside: dict[str, bytes] = {}
        """Packed ids of words with a space before them, by the word without it; each ends visibly."""
        self._at_ends: dict[tuple[bool, str], bytes] = {}
        """The same of what texts begin with, without a space, and (True) end with, however that ends."""

    def __len__(self) -> int:
        return len(self._inside) + len(self._at_ends)

    def look_up(self, text: str, most_new: int = MAX_NEW_WORDS) -> Pieces:
        """Cut a text, and say what of it is known. What follows `most_new` unknown words is one piece."""
        inside, parts = self._inside, text.split(" ")
        ids: list[bytes | None] = [None, *map(inside.get, parts[1:-1]), None][: len(parts)]
        pieces: list[str | bytes] = []
        new: set[str] = set()
        start = 0
        for row in [row for row, found in enumerate(ids) if found is None]:
            if row < start:
                continue
            if start < row:
                pieces.append(b"".join(cast("list[bytes]", ids[start:row])))
            start = row + 1 if len(new) < most_new else len(parts)
            while start < len(parts) and not ends_visibly(parts[start - 1]):
                start += 1
            word = " ".join(parts[row:start])
            at_end = row == 0 or start == len(parts)
            seen = self._at_ends.get((row > 0, word)) if at_end else inside.get(word)
            if seen is None:
                new.add(word)
            pieces.append(" " * (row > 0) + word if seen is None else seen)
        return pieces

    def learn(self, pieces: Pieces, found: Mapping[str, bytes]) -> None:
        """Take in what the unknown ones of a text's pieces have been found to be."""
        if len(self) + len(found) > self._max_words:
            self._inside, self._at_ends = {}, {}  # whoever reads the old ones goes on with them
        last = len(pieces) - 1
        for row, piece in enumerate(pieces):
            if isinstance(piece, str) and len(piece) <= MAX_WORD_CHARS:
                if 0 < row < last:
                    self._inside[piece[1:]] = found[piece]
                else:
                    self._at_ends[row > 0, piece[row > 0 :]] = found[piece]
