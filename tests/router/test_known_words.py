"""Texts of known and new words have the ids that the library gives them whole; memory is bounded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from odd_texts import FRAGMENTS, odd_texts
from tiny_tokenizer import save_tokenizer
from tokenizers import Tokenizer, pre_tokenizers, processors

from kvhive.proto.block_hash import pack_tokens, unpack_tokens
from kvhive.router.known_words import MAX_NEW_WORDS, MAX_WORD_CHARS, KnownWords


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Of Llama 3's kind: a text gets BOS."""
    save_tokenizer(tmp_path, "llama-bpe")
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def long_text(seed: int, words: int = 400) -> str:
    return " ".join(random.Random(seed).choices(["hello", "world", "1234", "well.", "<|im_end|>"], k=words))


def encoded(words: KnownWords, text: str, special: bool = False) -> list[int]:
    return unpack_tokens(words.complete(words.look_up(text, special)))


@pytest.mark.parametrize("most", [MAX_NEW_WORDS, 10_000])
def test_new_known_and_partly_known_texts_all_equal_the_whole(tokenizer: Tokenizer, most: int) -> None:
    words, choices = KnownWords(tokenizer, max_words=most), random.Random(5)
    begins = ["".join(choices.choices(FRAGMENTS, k=400)) + " " + long_text(n) for n in range(4)]
    for text in odd_texts(200, seed=6):
        text = choices.choice(["", "hello", long_text(1), *begins]) + text
        special = choices.random() < 0.5
        assert encoded(words, text, special) == tokenizer.encode(text, add_special_tokens=special).ids, text
        assert len(words) <= most


def test_a_text_of_known_words_costs_nothing(tokenizer: Tokenizer) -> None:
    words = KnownWords(tokenizer)
    encoded(words, f"first {long_text(1)} last")
    for begin, end, unknown in (("first", "last", 0), ("hello", "last", 5), ("first", "hello", 6)):
        text = f"{begin} {long_text(2)} {end}"
        begun = words.look_up(text, add_special_tokens=True)
        assert begun.unknown_chars == unknown
        assert unpack_tokens(words.complete(begun)) == tokenizer.encode(text).ids


def test_a_word_that_begins_a_text_is_not_the_same_inside_one(tokenizer: Tokenizer) -> None:
    words = KnownWords(tokenizer)
    for text in ("hello hello hello end", " hello hello  hello end", "  hello  hello end", "hello  end  end"):
        for _ in range(2):
            assert encoded(words, text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_white_space_of_any_length_is_a_part_of_a_word(tokenizer: Tokenizer) -> None:
    words, text = KnownWords(tokenizer), "def hello\n    world  hello\n\n    world" * 100 + " end"
    assert encoded(words, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert words.look_up(text, False).unknown_chars == 0
    assert encoded(words, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_ends_a_text_is_not_taken_for_a_word_in_one(tokenizer: Tokenizer) -> None:
    words = KnownWords(tokenizer)
    for text in ("hello world\n", "hello  ", "hello world\n world", "hello  world  hello", "hello \n world"):
        for _ in range(2):
            assert encoded(words, text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_words_are_bounded_in_number_and_length(tokenizer: Tokenizer) -> None:
    words = KnownWords(tokenizer, max_words=300)
    for start in range(0, 4000, 200):
        encoded(words, " ".join(map(str, range(start, start + 202))))
        assert 200 <= len(words) <= 300
    before = len(words)
    encoded(words, " ".join(letter * (MAX_WORD_CHARS + 1) for letter in "abc"))
    assert len(words) == before


def test_of_a_text_of_new_words_a_bounded_number_is_learned(tokenizer: Tokenizer) -> None:
    words = KnownWords(tokenizer)
    text = " ".join(map(str, range(MAX_NEW_WORDS * 3)))
    for learned in (MAX_NEW_WORDS, 2 * MAX_NEW_WORDS, 3 * MAX_NEW_WORDS, 3 * MAX_NEW_WORDS):
        assert encoded(words, text, special=True) == tokenizer.encode(text).ids
        assert len(words) == learned


def test_special_tokens_stand_where_the_library_puts_them(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|> <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 3)]
    )
    words = KnownWords(tokenizer)
    for text in ("", "hello", long_text(1), long_text(1)):
        assert encoded(words, text, special=True) == tokenizer.encode(text).ids
        assert encoded(words, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(words) == 8


def test_a_vocabulary_that_may_not_be_cut_gets_its_texts_whole(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    words = KnownWords(tokenizer)
    for _ in range(2):
        begun = words.look_up(long_text(1), True)
        assert begun.pieces == [long_text(1)] and begun.unknown_chars == len(long_text(1))
        assert words.complete(begun) == pack_tokens(tokenizer.encode(long_text(1)).ids)
    assert len(words) == 0
