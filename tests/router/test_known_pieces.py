"""What is tokenised once is found again, equals the whole, and takes a bounded amount of memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from odd_texts import FRAGMENTS
from tiny_tokenizer import save_tokenizer
from tokenizers import Tokenizer, pre_tokenizers, processors

from kvhive.proto.block_hash import pack_tokens, unpack_tokens
from kvhive.router.known_pieces import LONGEST_KEPT_CHARS, KnownPieces
from kvhive.router.text_cuts import PIECE_CHARS


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Of Llama 3's kind: a text gets BOS."""
    save_tokenizer(tmp_path, "llama-bpe")
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def long_text(seed: int, words: int = 400) -> str:
    return " ".join(random.Random(seed).choices(["hello", "world", "1234", "well.", "<|im_end|>"], k=words))


def encoded(pieces: KnownPieces, text: str, special: bool = False) -> list[int]:
    return unpack_tokens(pieces.complete(pieces.look_up(text, special)))


def test_new_known_and_partly_known_texts_all_equal_the_whole(tokenizer: Tokenizer) -> None:
    pieces, choices = KnownPieces(tokenizer), random.Random(5)
    begins = ["".join(choices.choices(FRAGMENTS, k=400)) + " " + long_text(n) for n in range(4)]
    hits = 0
    for _ in range(100):
        text = choices.choice(begins) + "".join(choices.choices(FRAGMENTS, k=30))
        special = choices.random() < 0.5
        hits += pieces.look_up(text, special).unknown_chars < len(text) / 2
        whole = tokenizer.encode(text, add_special_tokens=special).ids
        assert encoded(pieces, text, special) == whole, text
    assert hits > 50


def test_a_conversation_that_goes_on_costs_what_is_new(tokenizer: Tokenizer) -> None:
    pieces, text = KnownPieces(tokenizer), long_text(1)
    for turn in range(2, 12):
        encoded(pieces, text)
        new = " " + long_text(turn, words=60)
        text += new
        assert pieces.look_up(text, False).unknown_chars < len(new) + 2 * PIECE_CHARS + 10


def test_the_last_piece_is_not_kept(tokenizer: Tokenizer) -> None:
    pieces = KnownPieces(tokenizer)
    encoded(pieces, "hello world")
    assert pieces.kept_bytes == 0
    assert pieces.look_up("hello world", False).unknown_chars == len("hello world")


def test_memory_is_bounded_and_the_latest_used_stay(tokenizer: Tokenizer) -> None:
    pieces = KnownPieces(tokenizer, max_kept_bytes=40_000)
    often = long_text(1)
    for seed in range(2, 40):
        encoded(pieces, often)
        encoded(pieces, long_text(seed))
        assert pieces.kept_bytes <= 40_000
    assert pieces.look_up(often, False).unknown_chars < 3 * PIECE_CHARS
    assert pieces.look_up(long_text(2), False).unknown_chars == len(long_text(2))


def test_what_was_counted_is_given_back_when_it_goes(tokenizer: Tokenizer) -> None:
    pieces = KnownPieces(tokenizer, max_kept_bytes=0)
    for seed in range(20):
        encoded(pieces, long_text(seed) + " Привет 你好 😀 " + long_text(seed))
    assert pieces.kept_bytes == 0


def test_text_without_a_place_to_cut_is_not_kept(tokenizer: Tokenizer) -> None:
    pieces = KnownPieces(tokenizer)
    whole = "x" * (LONGEST_KEPT_CHARS + 1) + " hello"
    assert encoded(pieces, whole) == tokenizer.encode(whole, add_special_tokens=False).ids
    assert pieces.kept_bytes == 0


def test_special_tokens_stand_where_the_library_puts_them(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|> <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 3)]
    )
    pieces = KnownPieces(tokenizer)
    for text in ("", "hello", long_text(1), long_text(1)):
        assert encoded(pieces, text, special=True) == tokenizer.encode(text).ids
        assert encoded(pieces, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert pieces.kept_bytes > 0


def test_a_vocabulary_that_may_not_be_cut_gets_its_texts_whole(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = KnownPieces(tokenizer)
    for _ in range(2):
        begun = pieces.look_up(long_text(1), True)
        assert begun.pieces == [long_text(1)] and begun.unknown_chars == len(long_text(1))
        assert pieces.complete(begun) == pack_tokens(tokenizer.encode(long_text(1)).ids)
    assert pieces.kept_bytes == 0
