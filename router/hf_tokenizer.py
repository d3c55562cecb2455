"""A tokenizer from a Hugging Face directory: tokenizer.json, and what its neighbours add.

Whether a text gets BOS or EOS is tokenizer.json's word alone (its post-processor); `add_bos_token` in
tokenizer_config.json is a leftover that transformers ignores beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvhive.proto.errors import ModelError
from kvhive.router.tokenizer_parts import TokenizerParts

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def load_hf_tokenizer(directory: Path) -> TokenizerParts:
    """Read a directory's tokenizer. Raises ModelError when tokenizer.json is missing or damaged."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{directory}: has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception, whatever is wrong with the file
        raise ModelError(f"{file}: not a usable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    _add_missing_tokens(tokenizer, config, special)
    generation = _read_json(directory / "generation_config.json").get("eos_token_id")
    ends = _ids(
        _read_json(directory / "config.json").get("eos_token_id") if generation is None else generation
    )
    eos = tokenizer.token_to_id(special.get("eos_token", ""))
    if eos is not None:
        ends.add(eos)
    return TokenizerParts(tokenizer, special, frozenset(ends), _chat_template(directory, config))


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is no such file. Raises ModelError when it is damaged."""
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must be a JSON object, is {type(value).__name__}")
    return value


def _token_text(token: object) -> str | None:
    """Return a token's text; files spell it as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json knows, by id, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        content = _token_text(entry)
        if content is None or content in known:
            continue
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "special")}
        flags["normalized"] = bool(entry.get("normalized", not flags["special"]))
        tokenizer.add_tokens([AddedToken(content, **flags)])
        known.add(content)
    missing = [
        AddedToken(text, special=True) for text in dict.fromkeys(special.values()) if text not in known
    ]
    tokenizer.add_special_tokens(missing)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the default chat template: its own file first, then tokenizer_config.json's string or list."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
