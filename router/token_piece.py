"""What one token is on its own: a text for people and its bytes, whatever stands beside it."""

from __future__ import annotations

import re

from kvhive.router.frontend import TokenPiece
from kvhive.router.tokenizer import TextTokenizer

_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"
"""What SentencePiece writes for a space."""


def token_piece(tokenizer: TextTokenizer, token_id: int) -> TokenPiece:
    r"""Return a token's piece. A part of a character is spelled `bytes:\xf0\x9f`, as OpenAI does.

    In a vocabulary that is not byte-level, a token at the very start of an output may have a space here that
    the decoded text leaves out.
    """
    data = _data(tokenizer, token_id)
    if not data:
        return TokenPiece(tokenizer.token_name(token_id), b"")
    try:
        return TokenPiece(data.decode(), data)
    except UnicodeDecodeError:
        return TokenPiece("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)


def _data(tokenizer: TextTokenizer, token_id: int) -> bytes:
    if tokenizer.is_byte_level:
        return tokenizer.token_bytes(token_id)
    if tokenizer.is_special(token_id):
        return b""
    name = tokenizer.token_name(token_id)
    byte = _BYTE_FALLBACK.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace(_WORD_MARK, " ").encode()
