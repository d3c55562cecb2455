"""What words were tokenised to: most of a text's were in another one, and looking one up takes nanoseconds.

So a text of 4 KB takes a tenth of the millisecond that the library takes, though nobody has sent it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvhive.proto.block_hash import pack_tokens
from kvhive.router.text_cuts import ends_visibly, may_be_cut

MAX_WORDS = 100_000
"""About 20 MB. When there are more, all are forgotten: those in use are soon known again."""
MAX_WORD_CHARS = 32
"""Longer ones, such as two words with the markup between two messages, seldom come back."""
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

    def __len__(self) -> int:
        return len(self._known)

    def look_up(self, text: str, add_special_tokens: bool) -> PartlyKnown:
        """Cut a text, and say what of it is known: never what it begins and ends with."""
        if self._ends is None:
            return PartlyKnown([text], add_special_tokens)
        known, parts = self._known, text.split(" ")
        ids: list[bytes | None] = [None, *map(known.get, parts[1:-1]), None][: len(parts)]
        pieces: list[str | bytes] = []
        start = new = 0
        for row in [row for row, found in enumerate(ids) if found is None]:
            if row < start:
                continue
            if start < row:
                pieces.append(b"".join(filter(None, ids[start:row])))
            start = row + 1 if new < MAX_NEW_WORDS else len(parts)  # then the rest is one piece
            while start < len(parts) and not ends_visibly(parts[start - 1]):
                start += 1
            word = " ".join(parts[row:start])
            seen = known.get(word) if row > 0 and start < len(parts) else None
            pieces.append(" " * (row > 0) + word if seen is None else seen)
            new += seen is None
        return PartlyKnown(pieces, ends=self._ends if add_special_tokens else (b"", b""))

    def complete(self, text: PartlyKnown) -> bytes:
        """Return the packed ids of the whole text, having tokenised what of it was not known."""
        unknown = list(dict.fromkeys(text.unknown))
        found = dict(zip(unknown, self._tokenized(unknown, text.special), strict=True))
        self._learn({word: found[word] for word in text.unknown[1:-1]})
        between = (found[piece] if isinstance(piece, str) else piece for piece in text.pieces)
        return b"".join((text.ends[0], *between, text.ends[1]))

    def _tokenized(self, texts: Sequence[str], special: bool = False) -> list[bytes]:
        # This call releases the GIL and skips offsets: 3 times faster, and the event loop keeps running.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special) if texts else ()
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _learn(self, found: Mapping[str, bytes]) -> None:
        new = {piece[1:]: ids for piece, ids in found.items() if len(piece) <= MAX_WORD_CHARS}
        if len(self._known) + len(new) > self._max_words:
            self._known = {}  # whoever reads the old one goes on with it
        self._known.update(new)


def _special_ends(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """Return the packed special tokens before and after every text; None where it is not as simple."""
    (bare,), (whole,) = (tokenizer.encode_batch_fast(["a"], add_special_tokens=add) for add in (False, True))
    ids, text = whole.ids, bare.ids
    for start in range(len(ids) - len(text) + 1):
        end = start + len(text)
        if text and ids[start:end] == text and not any(each in ids[:start] + ids[end:] for each in text):
            return pack_tokens(ids[:start]), pack_tokens(ids[end:])
    return None
