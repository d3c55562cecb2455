"""Texts of known and new passages have the ids that the library gives them whole; memory is bounded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from odd_texts import FRAGMENTS, odd_texts
from tiny_tokenizer import save_tokenizer
from tokenizers import Tokenizer, pre_tokenizers, processors

from kvhive.proto.block_hash import pack_tokens, unpack_tokens
from kvhive.router.known_text import LONGEST_KEPT_CHARS, KnownText
from kvhive.router.known_words import MAX_NEW_WORDS
from kvhive.router.text_cuts import PASSAGE_CHARS


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Of Llama 3's kind: a text gets BOS."""
    save_tokenizer(tmp_path, "llama-bpe")
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def long_text(seed: int, words: int = 400) -> str:
    return " ".join(random.Random(seed).choices(["hello", "world", "1234", "well.", "<|im_end|>"], k=words))


def encoded(known: KnownText, text: str, special: bool = False, ended: bool = False) -> list[int]:
    return unpack_tokens(known.complete(known.look_up(text, special, ended)))


@pytest.mark.parametrize("kept", [0, 20_000, 10**9])
def test_new_known_and_partly_known_texts_all_equal_the_whole(tokenizer: Tokenizer, kept: int) -> None:
    known, choices = KnownText(tokenizer, max_kept_bytes=kept), random.Random(5)
    begins = ["".join(choices.choices(FRAGMENTS, k=400)) + " " + long_text(n) for n in range(4)]
    for text in odd_texts(200, seed=6):
        text = choices.choice(["", "hello", " ", *begins, *begins]) + text
        special = choices.random() < 0.5
        ended = choices.random() < 0.5
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        assert encoded(known, text, special, ended) == ids, text
        assert known.kept_bytes <= kept


def test_a_conversation_that_goes_on_costs_what_is_new(tokenizer: Tokenizer) -> None:
    known, text = KnownText(tokenizer), " ".join(map(str, range(2000)))
    for turn in range(2, 12):
        encoded(known, text)
        new = " " + " ".join(map(str, range(10_000 * turn, 10_000 * turn + 50)))
        text += new
        assert 0 < known.look_up(text, False).unknown_chars < len(new) + 2 * PASSAGE_CHARS + 10


def test_a_text_that_ends_for_others_is_known_whole(tokenizer: Tokenizer) -> None:
    known, text = KnownText(tokenizer), "hello world well. hello"
    for _ in range(2):
        encoded(known, text, ended=True)
    assert [pieces for _, pieces in known.look_up(text, False).passages] == [
        [pack_tokens(encoded(known, text))]
    ]


def test_a_text_of_known_words_costs_nothing(tokenizer: Tokenizer) -> None:
    known = KnownText(tokenizer)
    encoded(known, "hello world well. hello end")
    begun = known.look_up("hello well. world world end", add_special_tokens=True)
    assert begun.unknown_chars == 0
    assert unpack_tokens(known.complete(begun)) == tokenizer.encode("hello well. world world end").ids
    assert known.look_up("hello well. world end world", add_special_tokens=True).unknown == [" end", " world"]


def test_a_word_at_an_end_of_a_text_is_not_the_same_inside_one(tokenizer: Tokenizer) -> None:
    known = KnownText(tokenizer)
    for text in (
        *("hello hello hello end", " hello hello  hello end", "  hello  hello end", "hello  end  end"),
        *(
            "hello world\n",
            "hello  ",
            "hello world\n world",
            "hello  world  hello",
            "hello \n world",
            "hello",
        ),
    ):
        for _ in range(2):
            assert encoded(known, text) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_white_space_of_any_length_is_a_part_of_a_word(tokenizer: Tokenizer) -> None:
    known, text = KnownText(tokenizer), "def hello\n    world  hello\n\n    world end"
    for _ in range(2):
        assert encoded(known, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert known.look_up(text, False).unknown_chars == 0


def test_of_a_text_of_new_words_a_bounded_number_is_learned(tokenizer: Tokenizer) -> None:
    known = KnownText(tokenizer, max_kept_bytes=0)
    text = " ".join(map(str, range(MAX_NEW_WORDS * 8)))
    pieces = known.look_up(text, True)
    assert len(pieces.unknown) <= MAX_NEW_WORDS + len(pieces.passages)
    for _ in range(10):
        before = known.look_up(text, True).unknown_chars
        assert encoded(known, text, special=True) == tokenizer.encode(text).ids
        assert known.look_up(text, True).unknown_chars < before or before == 0


def test_memory_is_bounded_and_the_latest_used_stay(tokenizer: Tokenizer) -> None:
    known, often = KnownText(tokenizer, max_kept_bytes=40_000), long_text(1)
    for seed in range(2, 40):
        encoded(known, often)
        encoded(known, long_text(seed))
        assert known.kept_bytes <= 40_000
    held = [len(pieces) for _, pieces in known.look_up(often, False).passages]
    assert sum(count == 1 for count in held) >= len(held) - 1


def test_what_was_counted_is_given_back_when_it_goes(tokenizer: Tokenizer) -> None:
    known = KnownText(tokenizer, max_kept_bytes=0)
    for seed in range(20):
        encoded(known, long_text(seed) + " Привет 你好 😀 " + long_text(seed))
    assert known.kept_bytes == 0


def test_text_without_a_place_to_cut_is_not_kept(tokenizer: Tokenizer) -> None:
    known = KnownText(tokenizer)
    whole = "x" * (LONGEST_KEPT_CHARS + 1) + " hello"
    assert encoded(known, whole) == tokenizer.encode(whole, add_special_tokens=False).ids
    assert known.kept_bytes == 0


def test_special_tokens_stand_where_the_library_puts_them(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|> <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 3)]
    )
    known = KnownText(tokenizer)
    for text in ("", "hello", long_text(1), long_text(1)):
        assert encoded(known, text, special=True) == tokenizer.encode(text).ids
        assert encoded(known, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert known.kept_bytes > 0


def test_a_vocabulary_that_may_not_be_cut_gets_its_texts_whole(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    known = KnownText(tokenizer)
    for _ in range(2):
        begun = known.look_up(long_text(1), True)
        assert begun.unknown == [long_text(1)]
        assert known.complete(begun) == pack_tokens(tokenizer.encode(long_text(1)).ids)
    assert known.kept_bytes == 0
