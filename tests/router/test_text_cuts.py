"""A text is cut only where its words give the ids of the whole, for vocabularies of which that is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from odd_texts import odd_texts
from tiny_tokenizer import LLAMA3, save_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvhive.router.gguf_tokenizer import _QWEN2, _TEKKEN, load_gguf_tokenizer
from kvhive.router.hf_tokenizer import load_hf_tokenizer
from kvhive.router.text_cuts import PASSAGE_CHARS, ends_visibly, may_be_cut, passages

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces(text: str) -> list[str]:
    """Cut a text wherever it may be."""
    parts = text.split(" ")
    ends = [row for row, part in enumerate(parts, 1) if ends_visibly(part) or row == len(parts)]
    words = [" ".join(parts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [words[0], *(f" {word}" for word in words[1:])]


def split_isolated(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


PRE_TOKENIZERS = {
    "gpt2": byte_level(),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    "llama3": split_isolated(LLAMA3),
    "qwen2": split_isolated(_QWEN2),
    "qwen3.5": split_isolated(QWEN35),
    "tekken": split_isolated(_TEKKEN),
    "gpt-oss": split_isolated(O200K),
}


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Tokenizer:
    """Our installed model's: 48,000 merges, so that a wrong cut shows. Tests change its pre-tokenizer."""
    return load_gguf_tokenizer(demo_gguf).tokenizer


def ids(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    encodings = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_all_words_together_give_the_ids_of_the_whole(demo: Tokenizer, kind: str, normalizer: Any) -> None:
    demo.pre_tokenizer, demo.normalizer = PRE_TOKENIZERS[kind], normalizer
    assert may_be_cut(demo)
    count = 0
    for text in odd_texts(400):
        parts = pieces(text)
        count += len(parts)
        assert "".join(parts) == text
        assert ids(demo, parts) == ids(demo, [text]), (text, parts)
    assert count > 2 * 400


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_every_pre_tokenizer_splits_where_it_is_cut(kind: str) -> None:
    pre_tokenizer = PRE_TOKENIZERS[kind]

    def words(text: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    for text in odd_texts(400, seed=2):
        assert [word for part in pieces(text) for word in words(part)] == words(text), text


def test_the_usual_vocabularies_may_be_cut(demo_gguf: Path, tmp_path: Path) -> None:
    assert may_be_cut(load_gguf_tokenizer(demo_gguf).tokenizer)
    for pre in ("gpt-2", "llama-bpe"):
        save_tokenizer(tmp_path, pre)
        assert may_be_cut(load_hf_tokenizer(tmp_path).tokenizer)


def test_nothing_is_cut_where_that_is_not_proven(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "gpt-2")

    def tokenizer(**parts: Any) -> Tokenizer:
        made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    def with_token(content: str = "<new>", **flags: bool) -> Tokenizer:
        made = tokenizer()
        made.add_tokens([AddedToken(content, **flags)])
        return made

    def with_pre(pre_tokenizer: Any) -> Tokenizer:
        return tokenizer(pre_tokenizer=pre_tokenizer)

    isolated = Regex(LLAMA3), "isolated"
    assert (
        may_be_cut(tokenizer()) and may_be_cut(with_token()) and may_be_cut(with_pre(split_isolated(LLAMA3)))
    )
    for refused in (
        with_pre(None),
        with_pre(pre_tokenizers.Metaspace()),
        with_pre(pre_tokenizers.Whitespace()),
        with_pre(pre_tokenizers.Split(" ", behavior="merged_with_previous")),
        with_pre(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        with_pre(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        with_pre(split_isolated(r"\p{L}+ ?|" + LLAMA3)),
        with_pre(split_isolated(LLAMA3.removesuffix(r"|\s+"))),
        with_pre(pre_tokenizers.Sequence([byte_level(), pre_tokenizers.Split(*isolated)])),
        with_pre(pre_tokenizers.Split(Regex(LLAMA3), behavior="removed")),
        with_pre(pre_tokenizers.Split(*isolated, invert=True)),
        tokenizer(normalizer=normalizers.NFKC()),
        tokenizer(normalizer=normalizers.Replace(" ", "▁")),
        with_token(lstrip=True),
        with_token(rstrip=True),
        with_token(single_word=True),
        with_token("a new one"),
        tokenizer(model=models.BPE(vocab={"a": 0}, merges=[], dropout=0.1)),
        tokenizer(model=models.WordLevel({"a": 0}, unk_token="a")),
    ):
        assert not may_be_cut(refused), refused


def test_a_text_may_be_cut_before_a_space_that_follows_a_visible_character() -> None:
    assert pieces("one two, three_ 4. é 你好 end") == [
        "one",
        " two,",
        " three_",
        " 4.",
        " é",
        " 你好",
        " end",
    ]
    assert pieces("a  b\n c\u00a0 d\u0301 e") == ["a", "  b\n c\u00a0 d\u0301 e"]
    assert pieces(" a ") == [" a", " "]


def test_equal_beginnings_are_cut_into_equal_passages_but_for_the_last() -> None:
    begin = " ".join(random.Random(3).choices(["router", "cache", "prefix.", "token"], k=500))
    first, second = passages(begin + " and then"), passages(begin + " or else, at greater length")
    assert "".join(first) == begin + " and then"
    assert first[:-1] == second[: len(first) - 1]
    assert all(PASSAGE_CHARS <= len(passage) < 2 * PASSAGE_CHARS + 10 for passage in first[:-1])


def test_texts_that_share_much_fall_into_step() -> None:
    shared = " ".join(random.Random(4).choices(["router", "cache", "prefix", "token", "model."], k=2000))
    first, second = passages("One head. " + shared), passages("Another head, which is longer. " + shared)
    assert len(set(first) & set(second)) > 0.8 * len(first)


def test_a_text_without_a_place_to_cut_stays_whole() -> None:
    for text in ("", "x" * 5000, " " * 5000, "你好" * 3000, "a\n" * 3000, " \t" * 3000):
        assert passages(text) == pieces(text) == [text]
