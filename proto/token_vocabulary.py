"""What each token of a model stands for, as grammars need to know it: bytes, control tokens, ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # loaded where a grammar is used: what computes without one needs no such library
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class TokenVocabulary:
    """A router makes it of a model's tokenizer; plain values, so that it travels between processes."""

    tokens: tuple[bytes, ...] = field(repr=False)
    """By id, what a token adds to the text; of a control token the name."""
    special: tuple[int, ...]
    """Control tokens, and ids that stand for nothing: no text leads to them."""
    ends: tuple[int, ...]
    """Tokens by which the model ends its output."""


VocabularyLoader: TypeAlias = Callable[[str], TokenVocabulary]
"""From the path of a model to its vocabulary: a function of a module, so that it travels by name."""


def make_tokenizer(vocabulary: TokenVocabulary) -> LLTokenizer:
    """Return llguidance's tokenizer of a vocabulary that has an end. Takes 0.5 s per
    50,000 tokens, in which no other thread of this process runs Python."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Spelled(vocabulary)), eos_token=list(vocabulary.ends))


class _Spelled:
    """The vocabulary as llguidance's wrapper asks for it. It tokenises byte by byte.

    That is used to force tokens ahead only, which we never ask for: masks need no tokenising.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self._bytes = {token: index for index, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of the bytes that are tokens."""
        return [self._bytes[bytes([byte])] for byte in text if bytes([byte]) in self._bytes]
