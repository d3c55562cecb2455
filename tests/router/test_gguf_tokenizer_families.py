"""Vocabularies of the architectures that GGUF files are served of: ids equal transformers' own conversion."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from kvhive.router.tokenizer import TextTokenizer

WORDS = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "llo",
    "hello",
    "▁w",
    "or",
    "ld",
    "orld",
    "▁hello",
]
WORDS += [
    "\n",
    "\n\n",
    "  ",
    "   ",
    "1",
    "2",
    "12",
    "▁▁h",
    "<",
    ">",
    "a",
    "é",
    "<start_of_turn>",
    "<end_of_turn>",
]
TEXTS = ["hello world", " hello", "hello  hello", "   hello", "é😀", "<start_of_turn>hello<end_of_turn>\n"]
TEXTS += [
    "",
    "\n\nhello",
    "12 1212",
    "a<bos>b",
    "hello ",
    "  ",
    "    world   ",
    "▁",
    "\x00\t",
    "<start_of_turn",
]
TEXTS += ["Über ÄÖÜ", "naïve café", "HTTPServer x's don't", "e\u0301 /// a//b", "12345 1234", "!!\r\n\r\n x"]


def write(path: Path, architecture: str, **fields: object) -> Path:
    """A GGUF file with a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "llama"])
def test_a_sentencepiece_vocabulary_is_read_as_its_architecture_means_it(
    tmp_path: Path, architecture: str
) -> None:
    """Gemma: no space in front, runs of spaces as tokens, merges in the order of the vocabulary."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    types = [3, 3, 3, 2] + [6] * 256 + [1] * (len(WORDS) - 2) + [4, 4]
    path = write(
        tmp_path / "model.gguf",
        architecture,
        model="llama",
        tokens=tokens,
        token_type=types,
        scores=[-1000.0] * len(tokens)
        if architecture != "llama"
        else [-float(i) for i in range(len(tokens))],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_space_prefix=architecture == "llama",
    )
    ours = TextTokenizer.load(path)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, False) == ids, repr(text)
        assert ours.encode(text, True) == [2, *ids]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.eos_token_ids == {1}


MERGES = [
    "Ġ h",
    "h e",
    "l l",
    "he ll",
    "hell o",
    "1 2",
    "12 3",
    "Ġ Ġ",
    "/ /",
    "X Y",
    "a b",
    "' s",
    "Ċ Ċ",
    "! !",
]


@pytest.mark.parametrize("pre", ["tekken", "qwen2", "llama-bpe"])
def test_a_byte_level_vocabulary_splits_as_its_pre_tokenizer_says(tmp_path: Path, pre: str) -> None:
    tokens = ["<|im_end|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    path = write(
        tmp_path / "model.gguf",
        "qwen3",
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[3] + [1] * (len(tokens) - 1),
        merges=MERGES,
        eos_token_id=0,
    )
    ours = TextTokenizer.load(path)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in [*TEXTS, "aXYb XYab//", "hello<|im_end|> 123 1 2 3"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, False) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids)
