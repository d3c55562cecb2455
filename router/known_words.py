"""What words were tokenised to: most of a text's were in another one, and looking one up takes nanoseconds.

So a text of 4 KB takes a tenth of the millisecond that the library takes, though nobody has sent it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from kvhive.proto.block_hash import pack_tokens
from kvhive.router.text_cuts import ends_visibly, may_be_cut

MAX_WORDS = 100_000
"""20 MB of usual ones, 100 MB of the longest. With more, all are forgotten: those in use soon come back."""
MAX_WORD_CHARS = 128
"""Enough for two words and the markup between two messages."""
MAX_NEW_WORDS = 256
"""Learned of one text, because alone a word takes the library three times as long as in a text."""


@dataclass(frozen=True, slots=True)
class PartlyKnown:
    """A text of which parts are tokenised."""

    pieces: Sequence[str | bytes]
    """Text that is still to be tokenised, and the packed ids of the rest."""
    special: bool = False
    """Whether the library is to add special tokens to the one piece that this then is."""
    ends: tuple[bytes, bytes] = (b"", b"")
    """Packed ids that stand before and after it all."""

    @property
    def unknown(self) -> list[str]:
        """What is still to be tokenised, in order."""
        return [piece for piece in self.pieces if isinstance(piece, str)]

    @property
    def unknown_chars(self) -> int:
        """How many characters that is."""
        return sum(map(len, self.unknown))


class KnownWords:
    """One vocabulary's words. Thread-safe.

    A vocabulary whose texts may not be cut (text_cuts.py) gets them whole, and nothing is learned.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int = MAX_WORDS) -> None:
        assert max_words >= MAX_NEW_WORDS
        self._tokenizer = tokenizer
        self._ends = _special_ends(tokenizer) if may_be_cut(tokenizer) else None
        self._max_words = max_words
        self._known: dict[str, bytes] = {}
        """Packed ids of words with a space before them, by the word without it; each ends visibly."""
        self._at_ends: dict[tuple[bool, str], bytes] = {}
        """The same of what texts begin with, without a space, and (True) end with, however that ends."""

    def __len__(self) -> int:
        return len(self._known) + len(self._at_ends)

    def look_up(self, text: str, add_special_tokens: bool) -> PartlyKnown:
        """Cut a text, and say what of it is known."""
        if self._ends is None:
            return PartlyKnown([text], add_special_tokens)
        known, parts = self._known, text.split(" ")
        ids: list[bytes | None] = [None, *map(known.get, parts[1:-1]), None][: len(parts)]
        pieces: list[str | bytes] = []
        new: set[str] = set()
        start = 0
        for row in [row for row, found in enumerate(ids) if found is None]:
            if row < start:
                continue
            if start < row:
                pieces.append(b"".join(cast("list[bytes]", ids[start:row])))
            start = row + 1 if len(new) < MAX_NEW_WORDS else len(parts)  # then the rest is one piece
            while start < len(parts) and not ends_visibly(parts[start - 1]):
                start += 1
            word = " ".join(parts[row:start])
            seen = self._at_ends.get((row > 0, word)) if start == len(parts) or not row else known.get(word)
            if seen is None:
                new.add(word)
            pieces.append(" " * (row > 0) + word if seen is None else seen)
        return PartlyKnown(pieces, ends=self._ends if add_special_tokens else (b"", b""))

    def complete(self, text: PartlyKnown) -> bytes:
        """Return the packed ids of the whole text, having tokenised what of it was not known."""
        unknown = list(dict.fromkeys(text.unknown))
        found = dict(zip(unknown, self._tokenized(unknown, text.special), strict=True))
        if found and self._ends is not None:
            self._learn(text.pieces, found)
        between = (found[piece] if isinstance(piece, str) else piece for piece in text.pieces)
        return b"".join((text.ends[0], *between, text.ends[1]))

    def _tokenized(self, texts: Sequence[str], special: bool = False) -> list[bytes]:
        # This call releases the GIL and skips offsets: 3 times faster, and the event loop keeps running.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special) if texts else ()
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _learn(self, pieces: Sequence[str | bytes], found: Mapping[str, bytes]) -> None:
        if len(self) + len(found) > self._max_words:
            self._known, self._at_ends = {}, {}  # whoever reads the old ones goes on with them
        last = len(pieces) - 1
        for row, piece in enumerate(pieces):
            if isinstance(piece, str) and len(piece) <= MAX_WORD_CHARS:
                if 0 < row < last:
                    self._known[piece[1:]] = found[piece]
                else:
                    self._at_ends[row > 0, piece[row > 0 :]] = found[piece]


def _special_ends(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """Return the packed special tokens before and after every text; None where it is not as simple."""
    (bare,), (whole,) = (tokenizer.encode_batch_fast(["a"], add_special_tokens=add) for add in (False, True))
    ids, text = whole.ids, bare.ids
    for start in range(len(ids) - len(text) + 1):
        end = start + len(text)
        if text and ids[start:end] == text and not any(each in ids[:start] + ids[end:] for each in text):
            return pack_tokens(ids[:start]), pack_tokens(ids[end:])
    return None
