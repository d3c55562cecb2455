"""A tokenizer for a random model: its words are bytes and pairs of letters, so that every id is text."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
"""Id 0, which ends a text."""


def write_random_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write tokenizer.json and tokenizer_config.json beside a model of `vocabulary` tokens, at least 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    pairs = list(itertools.product(letters, letters))[: vocabulary - 1 - len(alphabet)]
    words = [END, *alphabet, *("".join(pair) for pair in pairs)]
    if len(words) != vocabulary:
        raise ValueError(f"vocabulary: must be between {1 + len(alphabet)} and 933, is {vocabulary}")
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
