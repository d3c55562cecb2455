"""A small tokenizer of real kinds, with a chat template, as files beside a model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvhive.router.tokenizer_parts import TokenizerParts

SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
BOS, EOS, EOT = 0, 3, 2
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "12 3"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def save_tokenizer(directory: Path, pre: str) -> None:
    """What a model of this kind has beside its safetensors."""
    vocabulary = {word: index for index, word in enumerate(words())}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def sentencepiece_parts(scheme: str, template: str) -> TokenizerParts:
    """A vocabulary with `▁` for spaces and bytes as tokens, of which texts may not be cut."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = ["h e", "l l", "he ll", "hell o", "▁ hello", "▁ w", "o r", "▁w or", "l d", "▁wor ld"]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    entries += [merge.replace(" ", "") for merge in merges]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {word: index for index, word in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    if scheme == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    decoding = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in entries[:3]])
    return TokenizerParts(tokenizer, {}, frozenset({2}), template)
