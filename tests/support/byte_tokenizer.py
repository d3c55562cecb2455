"""A tokenizer of which every token is a byte, but for the special ones: the least that grammars need."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.tokenizer_parts import TokenizerParts

END = "<end>"


def byte_tokenizer(special: Sequence[str] = ()) -> TextTokenizer:
    """Make one, with these special tokens besides the one that ends an output."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in (END, *special)]
    )
    return TextTokenizer(TokenizerParts(tokenizer, {}, frozenset({tokenizer.token_to_id(END)}), None))
