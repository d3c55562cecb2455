"""Deltas concatenate to exactly what decoding everything at once gives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.router.detokenizer import IncrementalDetokenizer
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.tokenizer_parts import TokenizerParts


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


def deltas(tokenizer: TextTokenizer, ids: list[int], step: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), step=st.integers(1, 5))
def test_random_ids(tokenizer: TextTokenizer, ids: list[int], step: int) -> None:
    assert "".join(deltas(tokenizer, ids, step)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.sampled_from([*range(17, 300), 0, 2]), max_size=40))
def test_random_bytes_and_special_tokens(tokenizer: TextTokenizer, ids: list[int]) -> None:
    """The first ids after the special tokens are single bytes: mostly invalid UTF-8."""
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("a é 你好世界𠮷😀👩🏽‍🚀🇩🇪\n\x00ß"), max_size=40))
def test_characters_are_never_split(tokenizer: TextTokenizer, text: str) -> None:
    pieces = deltas(tokenizer, tokenizer.encode(text, False))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_text_comes_as_soon_as_it_is_complete(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("Hi 😀!", False)
    pieces = deltas(tokenizer, ids)
    assert pieces[0] == "Hi"
    assert [p for p in pieces if p] in (["Hi", " 😀", "!"], ["Hi", " ", "😀", "!"])


def test_output_that_starts_inside_a_character_shows_no_prompt(tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("Hello world 🦩", False)
    rest = prompt[-1:]
    assert "Hello" not in "".join(deltas(tokenizer, rest))
    assert "".join(deltas(tokenizer, rest)) == tokenizer.decode(rest)


def test_time_grows_linearly(tokenizer: TextTokenizer) -> None:
    def seconds(count: int) -> float:
        ids = [1000 + i % 20000 for i in range(count)]
        start = time.process_time()
        deltas(tokenizer, ids)
        return time.process_time() - start

    seconds(1000)
    assert seconds(40000) < 40 * max(seconds(4000), 0.002)


def sentencepiece(special: str = "") -> TextTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁hello", "▁world", "▁", "!", "s"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    if special:
        tokenizer.add_special_tokens([AddedToken(special, normalized=False, special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    tokenizer.decoder = decoders.Sequence(steps)
    return TextTokenizer(TokenizerParts(tokenizer, {}, frozenset(), None))


def test_other_vocabularies_keep_their_spacing_and_whole_characters() -> None:
    tokenizer = sentencepiece()
    emoji = [1 + b for b in "😀é".encode()]
    ids = [257, 258, 261, *emoji, 260, 258, 259, 259, 257]
    assert not tokenizer.is_byte_level
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "hello worlds😀é! world   hello"
    assert pieces[:3] == ["hello", " world", "s"]


@pytest.mark.parametrize("shown", [False, True])
def test_special_tokens_are_shown_only_where_asked(shown: bool) -> None:
    """In any vocabulary; a character that one interrupts is broken."""
    for tokenizer in (sentencepiece(special="[CALL]"), byte_tokenizer(["[CALL]"])):
        call = tokenizer.special_token("[CALL]")
        assert call is not None and tokenizer.special_token("s") is None
        words, half = tokenizer.encode("s!", False), tokenizer.encode("é", False)[:1]
        mark = "[CALL]" if shown else ""
        for step in (1, 9):
            detokenizer = IncrementalDetokenizer(tokenizer, {call: "[CALL]"} if shown else None)
            ids = [call, *words, call, call, *words, *half, call]
            pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
            text = "".join(pieces) + detokenizer.flush()
            assert text == f"{mark}s!{mark}{mark}s!\ufffd{mark}"


def test_a_flood_of_broken_bytes_is_not_held_back_for_ever() -> None:
    tokenizer = sentencepiece()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([1 + 0x80] * 1000).count("\ufffd") > 900
