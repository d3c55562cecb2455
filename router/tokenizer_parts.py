"""What a model's files say about its tokenizer, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The pieces that `TextTokenizer` is made of."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """Named special tokens that are set: `bos_token`, `eos_token`, ...; chat templates read them."""
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""
    chat_template: str | None
    """Jinja source, or None for a model that has no chat format."""


def set_bos_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `tokenizer` put `bos` before and `eos` after a text when special tokens are asked for."""
    pattern = " ".join(token for token in (bos, "$A", eos) if token)
    named = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = TemplateProcessing(single=pattern, special_tokens=named)
