"""What the tokens of tiny models stand for: every byte, pieces of JSON, and some that are no text."""

from __future__ import annotations

from kvhive.proto.token_vocabulary import TokenVocabulary

END, OTHER_END, CONTROL, NOTHING = 256, 257, 258, 259
PIECES = [
    *(b'{"', b'":', b'": ', b'",', b'", "', b'"}', b"}}", b"[]", b"true", b"false", b"null", b"12", b" 1"),
    *(b", ", b"\n  ", "é".encode(), "€".encode(), "日".encode(), b"ab", b"the", b'"a', b"]}", b"0.", b"-1"),
]
TINY = TokenVocabulary(
    (*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<|other|>", b"<|control|>", b"", *PIECES),
    (END, OTHER_END, CONTROL, NOTHING),
    (END, OTHER_END),
)
"""Shorter than the model's vocabulary of logits, as padded ones are."""
