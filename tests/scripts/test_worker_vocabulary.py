"""A worker learns its tokens from the model's files, in every format that the router reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tiny_tokenizer import BOS, EOS, SPECIAL, save_tokenizer, words
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvhive.proto.errors import ModelError
from kvhive.proto.grammar import new_matcher
from kvhive.proto.token_vocabulary import make_tokenizer
from kvhive.router.token_vocabulary import token_vocabulary
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.tokenizer_parts import TokenizerParts
from kvhive.scripts.worker_vocabulary import load_vocabulary


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "gpt-2")
    vocabulary = load_vocabulary(str(tmp_path))
    assert vocabulary.ends == (EOS,) and vocabulary.special == tuple(range(len(SPECIAL)))
    assert vocabulary.tokens[BOS] == SPECIAL[BOS].encode()
    assert vocabulary.tokens[words().index("Ġhello")] == b" hello"
    assert {token for token in vocabulary.tokens if len(token) == 1} == {bytes([b]) for b in range(256)}


def test_a_sentencepiece_vocabulary() -> None:
    """Word marks are spaces, byte tokens are bytes, and a number that nobody bears is never written."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁{",
        '"',
        "a",
        "}",
        "▁a",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    vocabulary = token_vocabulary(
        TextTokenizer(TokenizerParts(tokenizer, {"eos_token": "</s>"}, frozenset({2, 9_999}), None))
    )
    assert vocabulary.ends == (2,) and vocabulary.special == (0, 1, 2)
    assert vocabulary.tokens[3:259] == tuple(bytes([byte]) for byte in range(256))
    assert vocabulary.tokens[259:] == (b" ", b" {", b'"', b"a", b"}", b" a")
    matcher = new_matcher(make_tokenizer(vocabulary), "regex", " \\{ a\\}\n")
    assert matcher.consume_tokens([260, 264, 263, 3 + ord("\n")]) and matcher.is_stopped()


def test_it_travels_by_name_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(load_vocabulary)) is load_vocabulary


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json"):
        load_vocabulary(str(tmp_path))
