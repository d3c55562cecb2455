"""What was tokenised before: passages, which prompts share, and words, which all texts share.

So what a conversation has said so far, or many prompts begin with, costs a look for each 256 characters, and
the rest one for each word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from threading import Lock

from tokenizers import Tokenizer

from kvhive.proto.block_hash import pack_tokens
from kvhive.router.known_words import MAX_NEW_WORDS, KnownWords, Pieces
from kvhive.router.text_cuts import PASSAGE_CHARS, may_be_cut, passages

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of memory for passages: about 25 MB of text, or a thousand conversations of 6,000 tokens."""
LONGEST_KEPT_CHARS = 16 * PASSAGE_CHARS
"""A longer passage has no place to be cut at, and may be megabytes."""
_TOKEN_BYTES = 4
_ENTRY_BYTES = 150
"""What a passage takes besides its two objects."""


@dataclass(frozen=True, slots=True)
class PartlyKnown:
    """A text of which parts are tokenised."""

    passages: Sequence[tuple[str, Pieces]]
    """Each with its pieces: text that is still to be tokenised, and packed ids."""
    special: bool = False
    """Whether the library is to add special tokens to the one piece that this then is."""
    ends: tuple[bytes, bytes] = (b"", b"")
    """Packed ids that stand before and after it all."""
    ended: bool = False
    """Whether it will come again and end there, so that its last passage is worth keeping, too."""
    left_out: int = 0
    """Of the ids, so many at the beginning: those of a joint (text_joint.py)."""

    @property
    def unknown(self) -> list[str]:
        """What is still to be tokenised."""
        return [piece for _, pieces in self.passages for piece in pieces if isinstance(piece, str)]

    @property
    def unknown_chars(self) -> int:
        """How many characters that is."""
        return sum(map(len, self.unknown))


class KnownText:
    """One vocabulary's. Thread-safe; bounded, the latest used stays.

    A vocabulary whose texts may not be cut (text_cuts.py) gets them whole, and nothing is learned.
    """

    def __init__(self, tokenizer: Tokenizer, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._ends = _special_ends(tokenizer) if may_be_cut(tokenizer) else None
        self._max_kept_bytes = max_kept_bytes
        self._words = KnownWords()
        self._passages: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.kept_bytes = 0

    def look_up(
        self, text: str, add_special_tokens: bool, ended: bool = False, left_out: int = 0
    ) -> PartlyKnown:
        """Cut a text, and say what of it is known."""
        if self._ends is None:
            return PartlyKnown([(text, [text])], add_special_tokens, left_out=left_out)
        cut, known = passages(text), self._passages
        with self._lock:
            ids = [known.get(passage) for passage in cut]
            for passage, found in zip(cut, ids, strict=True):
                if found is not None:
                    known.move_to_end(passage)
        room, partly = MAX_NEW_WORDS, list[tuple[str, Pieces]]()
        for passage, found in zip(cut, ids, strict=True):
            pieces: Pieces = self._words.look_up(passage, room) if found is None else [found]
            room = max(0, room - sum(isinstance(piece, str) for piece in pieces))
            partly.append((passage, pieces))
        ends = self._ends if add_special_tokens else (b"", b"")
        return PartlyKnown(partly, ends=ends, ended=ended, left_out=left_out)

    def complete(self, text: PartlyKnown) -> bytes:
        """Return the packed ids of the whole text, having tokenised what of it was not known."""
        unknown = list(dict.fromkeys(text.unknown))
        found = dict(zip(unknown, self._tokenized(unknown, text.special), strict=True))
        packed = [
            b"".join([found[piece] if isinstance(piece, str) else piece for piece in pieces])
            for _, pieces in text.passages
        ]
        # What is of one piece is known as a whole.
        if (found or (text.ended and len(text.passages[-1][1]) > 1)) and self._ends is not None:
            for _, pieces in text.passages:
                self._words.learn(pieces, found)
            # The last one ends where the text does: another text with this beginning has a longer one there.
            kept = text.passages if text.ended else text.passages[:-1]
            self._keep([passage for passage, _ in kept], packed)
        return b"".join((text.ends[0], *packed, text.ends[1]))[_TOKEN_BYTES * text.left_out :]

    def _tokenized(self, texts: Sequence[str], special: bool) -> list[bytes]:
        # This call releases the GIL and skips offsets: 3 times faster, and the event loop keeps running.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special) if texts else ()
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _keep(self, cut: Sequence[str], packed: Sequence[bytes]) -> None:
        with self._lock:
            for passage, ids in zip(cut, packed, strict=False):
                if passage not in self._passages and len(passage) <= LONGEST_KEPT_CHARS:
                    self._passages[passage] = ids
                    self.kept_bytes += _bytes_of(passage, ids)
            while self.kept_bytes > self._max_kept_bytes:
                self.kept_bytes -= _bytes_of(*self._passages.popitem(last=False))


def _bytes_of(passage: str, ids: bytes) -> int:
    return getsizeof(passage) + getsizeof(ids) + _ENTRY_BYTES


def _special_ends(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """Return the packed special tokens before and after every text; None where it is not as simple."""
    (bare,), (whole,) = (tokenizer.encode_batch_fast(["a"], add_special_tokens=add) for add in (False, True))
    ids, text = whole.ids, bare.ids
    for start in range(len(ids) - len(text) + 1):
        end = start + len(text)
        if text and ids[start:end] == text and not any(each in ids[:start] + ids[end:] for each in text):
            return pack_tokens(ids[:start]), pack_tokens(ids[end:])
    return None
