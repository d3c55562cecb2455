"""Do two models mean the same by a token id? What a model may draft for another."""

from __future__ import annotations

import json
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.gguf_file import read_gguf

_GGUF_TOKENS = "tokenizer.ggml.tokens"


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raise ModelError when some id names different tokens in two models, or a model names none.

    Ids that only one of them names are padding: the models' sizes are compared where they are loaded.
    """
    names, drafted = token_names(target), token_names(draft)
    for token_id in sorted(names.keys() & drafted.keys()):
        if names[token_id] != drafted[token_id]:
            raise ModelError(
                f"{draft}: cannot draft for {target}: token {token_id} is {drafted[token_id]!r} in one "
                f"vocabulary and {names[token_id]!r} in the other"
            )


def token_names(path: Path) -> dict[int, str]:
    """Return id -> token, as the tokenizer's own files spell it. Raises ModelError when there are none."""
    if path.is_file():
        tokens = dict(enumerate(read_gguf(path, {_GGUF_TOKENS}).strings.get(_GGUF_TOKENS, ())))
    else:
        tokens = _from_tokenizer_json(path / "tokenizer.json")
    if not tokens:
        raise ModelError(f"{path}: has no vocabulary to compare with another model's")
    return tokens


def _from_tokenizer_json(path: Path) -> dict[int, str]:
    try:
        document = json.loads(path.read_text("utf-8"))
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, dict):  # BPE, WordPiece
            tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
        else:  # Unigram: [token, score] in the order of the ids
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
        added = document.get("added_tokens") or []
        return tokens | {int(entry["id"]): str(entry["content"]) for entry in added}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path}: has no vocabulary to compare with another model's: {error!r}") from error
