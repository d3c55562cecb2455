"""A token on its own: never garbled, never merged with another, its bytes those of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvhive.router.token_piece import token_piece
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.tokenizer_parts import TokenizerParts

EMOJI = "A bird \N{BIRD}, a flag \N{WAVING BLACK FLAG}\u200d\N{SKULL AND CROSSBONES}, \u4f60\u597d and \xe9"


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


def test_the_bytes_of_all_tokens_are_the_text(tokenizer: TextTokenizer) -> None:
    pieces = [token_piece(tokenizer, i) for i in tokenizer.encode(EMOJI, add_special_tokens=False)]
    assert b"".join(piece.data for piece in pieces) == EMOJI.encode()
    parts = [piece for piece in pieces if piece.text.startswith("bytes:")]
    assert parts and all("\ufffd" not in piece.text for piece in pieces)
    assert parts[0].text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts[0].data)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_decode_to_their_bytes(tokenizer: TextTokenizer, ids: list[int]) -> None:
    data = b"".join(token_piece(tokenizer, i).data for i in ids)
    assert data.decode(errors="replace") == tokenizer.decode(ids)


def test_no_text_is_empty_and_none_stands_for_different_bytes(tokenizer: TextTokenizer) -> None:
    seen: dict[str, bytes] = {}
    for token_id in range(tokenizer.vocab_size):
        piece = token_piece(tokenizer, token_id)
        assert piece.text and seen.setdefault(piece.text, piece.data) == piece.data


def test_special_tokens_have_a_name_and_no_bytes(tokenizer: TextTokenizer) -> None:
    end = token_piece(tokenizer, min(tokenizer.eos_token_ids))
    assert end.text.startswith("<|") and end.data == b""
    assert token_piece(tokenizer, 10**6).text == "<|1000000|>"


def test_other_vocabularies_spell_spaces_and_bytes_too() -> None:
    vocabulary = ["<unk>", "\u2581Hello", "\u2581", "<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>", "x"]
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[]))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = TextTokenizer(TokenizerParts(raw, {}, frozenset(), None))
    pieces = [token_piece(tokenizer, i) for i in (1, 2, 3, 4, 5, 6, 7)]
    assert (
        b"".join(piece.data for piece in pieces)
        == " Hello \N{RACCOON}x".replace("\N{RACCOON}", b"\xf0\x9f\xa6\x9c".decode()).encode()
    )
    assert [piece.text for piece in pieces[:3]] == [" Hello", " ", "bytes:\\xf0"]
