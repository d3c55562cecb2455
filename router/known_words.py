"""What words were tokenised to: most of a text's were in another one, and looking one up takes nanoseconds.

So a text of 4 KB takes a tenth of the millisecond that the library takes, whether it was seen before or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvhive.proto.block_hash import pack_tokens
from kvhive.router.text_cuts import cut, ends_visibly, may_be_cut

MAX_WORDS = 100_000
"""About 20 MB. When there are more, all are forgotten: those in use are soon known again."""
MAX_WORD_CHARS = 32
"""Longer ones, such as two words with the markup between two messages, seldom come back."""
MAX_NEW_WORDS = 256
"""Learned of one text, because alone a word takes the library three times as long as in a text."""


@dataclass(frozen=True, slots=True)
class PartlyKnown:
    """A text in pieces, with the packed ids of those that are known."""

    pieces: Sequence[str]
    ids: Sequence[bytes | None]
    special: bool = False
    """Whether the library is to add special tokens to the one piece that this then is."""
    ends: tuple[bytes, bytes] = (b"", b"")
    """Packed ids that stand before and after it all."""

    @property
    def unknown_chars(self) -> int:
        """Characters that are still to be tokenised."""
        return sum(len(piece) for piece, ids in zip(self.pieces, self.ids, strict=True) if ids is None)


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
        """Cut a text, and say what of it is known."""
        if self._ends is None:
            return PartlyKnown([text], [None], add_special_tokens)
        ends = self._ends if add_special_tokens else (b"", b"")
        known, (first, *words) = self._known, text.split(" ")
        if len(words) > 1 and ends_visibly(first):
            try:  # they are usually all known, and none that is not one can be: each of those ends visibly
                between = b"".join([known[word] for word in words[:-1]])
                return PartlyKnown([first, "", f" {words[-1]}"], [None, between, None], ends=ends)
            except KeyError:
                pass
        first, *words = cut(text)
        ids: list[bytes | None] = [None, *map(known.get, words[:-1])]
        ids += [None] * (len(words) > 0)
        return PartlyKnown([first, *(f" {word}" for word in words)], ids, ends=ends)

    def complete(self, text: PartlyKnown) -> bytes:
        """Return the packed ids of the whole text, having tokenised what of it was not known."""
        missing = dict.fromkeys(
            piece for piece, known in zip(text.pieces, text.ids, strict=True) if known is None
        )
        between = missing.keys() & set(text.pieces[1:-1])  # what may stand between other words
        if len(missing) > MAX_NEW_WORDS:
            new = [piece for piece in missing if piece in between][:MAX_NEW_WORDS]
            whole, *ids = self._tokenized(["".join(text.pieces), *new])
            self._learn(dict(zip(new, ids, strict=True)))
        else:
            found = dict(zip(missing, self._tokenized(list(missing), text.special), strict=True))
            self._learn({piece: found[piece] for piece in between})
            pairs = zip(text.pieces, text.ids, strict=True)
            whole = b"".join([found[piece] if known is None else known for piece, known in pairs])
        return text.ends[0] + whole + text.ends[1]

    def _tokenized(self, texts: Sequence[str], special: bool = False) -> list[bytes]:
        # This call releases the GIL and skips offsets: 3 times faster, and the event loop keeps running.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special) if texts else []
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
