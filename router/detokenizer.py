"""Token ids to text, a piece at a time, never splitting a character.

It sees only output, never the prompt, so it cannot leak prompt text. For a byte-level vocabulary the
deltas concatenate to exactly `decode(all ids)`. For others a window of recent tokens is decoded again.
Special tokens have no text, but for those that are to be shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvhive.router.tokenizer import TextTokenizer

MAX_HELD_TOKENS = 32
"""Tokens after which the windowed way stops waiting for a character to complete: no character is longer."""


class IncrementalDetokenizer:
    """Turns one output into text deltas. Not thread-safe; one per request. Amortised O(1) per token."""

    def __init__(self, tokenizer: TextTokenizer, shown: Mapping[int, str] | None = None) -> None:
        """Prepare; `shown` is the text of special tokens that are to have one."""
        self._decoder: _Decoder = (
            _ByteLevelDecoder(tokenizer, shown or {})
            if tokenizer.is_byte_level
            else _WindowedDecoder(tokenizer, shown or {})
        )

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; it may be empty."""
        return self._decoder.push(ids)

    def flush(self) -> str:
        """Return what is still held back; an incomplete character shows as U+FFFD. Ends the output."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """Each token is a string of bytes; an incremental UTF-8 decoder joins them."""

    def __init__(self, tokenizer: TextTokenizer, shown: Mapping[int, str]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = {token_id: text.encode() for token_id, text in shown.items()}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        if not self._shown:
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        return self._utf8.decode(b"".join([self._shown.get(id_) or self._token_bytes(id_) for id_ in ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowedDecoder:
    """Decodes from the last emitted chunk on, so that spacing at a token's start comes out right.

    Exact but for byte-fallback runs that are not UTF-8, where the number of U+FFFD can differ.
    """

    def __init__(self, tokenizer: TextTokenizer, shown: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in ids])

    def flush(self) -> str:
        return self._take(self._new_text())

    def _push_one(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        self._held.append(token_id)
        text = self._new_text()
        if (not text or text.endswith("\ufffd")) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _take(self, text: str) -> str:
        if self._held:
            self._context, self._held = self._held, []
        return text
