"""A tokenizer from a GGUF file, which has no tokenizer.json: tokens, merges and types under llama.cpp's keys.

The ids equal those of transformers' own conversion (the tests' oracle), which cannot be used here: it
imports torch. Where transformers falls back to the GPT-2 split for a pre-tokenizer that it does not know,
this refuses: wrong splits give wrong ids silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvhive.proto.errors import ModelError
from kvhive.router.gguf_metadata import GgufValue, read_gguf_metadata
from kvhive.router.tokenizer_parts import TokenizerParts, set_bos_eos

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None is ByteLevel's built-in GPT-2 split. SmolLM's original splits digits one by one as well; transformers
# reads the GGUF without that, and equal ids with transformers are the promise.
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "olmo": None,
    "phi-2": None,
    "refact": None,
    "smollm": None,
    "starcoder": None,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "deepseek-r1-qwen": _QWEN2,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
_GEMMAS = ("gemma", "gemma2", "gemma3")


def load_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer that a GGUF file describes. Raises ModelError naming what is unsupported."""
    metadata = read_gguf_metadata(path)
    prefix = "tokenizer.ggml."
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    tokens, kind = fields.get("tokens"), fields.get("model")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path}: has no tokenizer.ggml.tokens")
    words = [str(token) for token in tokens]
    if kind == "llama" and metadata.get("general.architecture") in _GEMMAS:
        words = [_respelled(word) for word in words]
        tokenizer = _gemma(path, words, fields)
    elif kind == "gpt2":
        tokenizer = _byte_level(path, words, fields)
    elif kind == "llama":
        tokenizer = _sentencepiece(path, words, fields)
    else:
        raise ModelError(f"{path}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    special = {
        name: words[_id(path, fields, key, len(words))]
        for name, key in _SPECIAL_KEYS.items()
        if key in fields
    }
    _add_special_tokens(tokenizer, words, fields, special, byte_level=kind == "gpt2")
    # llama.cpp puts BOS before a SentencePiece vocabulary's text unless the file says otherwise.
    add_bos = bool(fields.get("add_bos_token", kind == "llama"))
    add_eos = bool(fields.get("add_eos_token", False))
    set_bos_eos(
        tokenizer,
        special.get("bos_token") if add_bos else None,
        special.get("eos_token") if add_eos else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        tokenizer=tokenizer,
        special_tokens=special,
        eos_token_ids=frozenset(_id(path, fields, key, len(words)) for key in _END_KEYS if key in fields),
        chat_template=template if isinstance(template, str) and template else None,
    )


def _id(path: Path, fields: Mapping[str, GgufValue], key: str, size: int) -> int:
    value = fields[key]
    if not isinstance(value, int) or not 0 <= value < size:
        raise ModelError(f"{path}: tokenizer.ggml.{key} must be below {size}, is {value!r}")
    return value


def _byte_level(path: Path, words: list[str], fields: Mapping[str, GgufValue]) -> Tokenizer:
    pre = fields.get("pre", "default")
    if pre not in _SPLITS:
        raise ModelError(
            f"{path}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; {', '.join(_SPLITS)} are"
        )
    merges = fields.get("merges")
    if not isinstance(merges, list):
        raise ModelError(f"{path}: has no tokenizer.ggml.merges")
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = _build(path, vocab, [_pair(path, str(merge)) for merge in merges], byte_fallback=False)
    split = _SPLITS[str(pre)]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, words: list[str], fields: Mapping[str, GgufValue]) -> Tokenizer:
    vocab = {word: index for index, word in enumerate(words)}
    merges, scores = fields.get("merges"), fields.get("scores")
    if isinstance(merges, list):
        pairs = [_pair(path, str(merge)) for merge in merges]
    elif isinstance(scores, list) and len(scores) == len(words):
        pairs = _merges_from_scores(vocab, dict(zip(words, map(float, scores), strict=True)))
    else:
        raise ModelError(f"{path}: has neither tokenizer.ggml.merges nor a tokenizer.ggml.scores per token")
    tokenizer = _build(path, vocab, pairs, byte_fallback=True)
    space_first = bool(fields.get("add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if space_first else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _respelled(word: str) -> str:
    """Gemma's runs of spaces stand as spaces in the file, but a text's spaces are looked up as "▁"."""
    return "▁" * len(word) if " " in word and not word.strip() else word


def _gemma(path: Path, words: list[str], fields: Mapping[str, GgufValue]) -> Tokenizer:
    """A SentencePiece vocabulary whose merges follow the order of the tokens, not their scores."""
    vocab = {word: index for index, word in enumerate(words)}
    merges = fields.get("merges")
    if isinstance(merges, list):
        pairs = [_pair(path, str(merge)) for merge in merges]
    else:
        pairs = _merges_from_scores(vocab, {word: -float(index) for word, index in vocab.items()})
    tokenizer = _build(path, vocab, pairs, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _build(
    path: Path, vocab: dict[str, int], merges: list[tuple[str, str]], *, byte_fallback: bool
) -> Tokenizer:
    for left, right in merges:
        # Checked here because the library panics instead of raising.
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ModelError(
                f"{path}: tokenizer.ggml.merges joins {left!r} and {right!r} outside the vocabulary"
            )
    return Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=byte_fallback, byte_fallback=byte_fallback)
    )


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{path}: tokenizer.ggml.merges has {merge!r}, which is not a pair")
    return left, right


def _merges_from_scores(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Recover BPE merges from a SentencePiece vocabulary: every split of a token into two tokens, best first.

    Ties go to the lower ids, then to the longer left and right parts, as transformers orders them.
    """
    found: list[tuple[float, str, str]] = []
    for word, score in scores.items():
        splits = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((score, left, right) for left, right in known)
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special_tokens(
    tokenizer: Tokenizer,
    words: list[str],
    fields: Mapping[str, GgufValue],
    special: Mapping[str, str],
    *,
    byte_level: bool,
) -> None:
    """Mark control and user-defined tokens, so that they stay whole in a text.

    A byte-level vocabulary spells every real token in the byte alphabet; a "control" token that does not
    is a mislabel of the converter's and stays unmarked.
    """
    types = fields.get("token_type")
    typed = list(zip(words, types if isinstance(types, list) else (), strict=False))
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    control = [w for w, t in typed if t == _CONTROL and (not byte_level or set(w) <= alphabet)]
    named = [word for word in special.values() if word not in control]
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in control + named]
    )
    user = [AddedToken(w, normalized=False, special=False) for w, t in typed if t == _USER_DEFINED]
    tokenizer.add_tokens(user)
