"""Typed access to the JSON files of a Hugging Face directory; whatever is wrong with them is a ModelError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DTYPES

_REQUIRED = object()


class Fields:
    """Typed access to a JSON mapping; an absent or null value takes the default, where there is one."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        """Take the mapping and the file to name in errors."""
        self.path = path
        self.raw = raw

    def integer(self, name: str, default: object = _REQUIRED) -> int:
        """Return an integer. Raises ModelError when it is missing or something else."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} must be an integer, is {value!r}")
        return value

    def number(self, name: str, default: object = _REQUIRED) -> float:
        """Return a number. Raises ModelError when it is missing or something else."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} must be a number, is {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None where there is none. Raises ModelError for something else."""
        return None if self.raw.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean. Raises ModelError for something else."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} must be true or false, is {value!r}")
        return value

    def mapping(self, name: str) -> Fields:
        """Return a mapping, empty where there is none. Raises ModelError for something else."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {name} must be a mapping, is {value!r}")
        return Fields(self.path, value)

    def _get(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {name} is missing")
            return default
        return value


def read_json(path: Path) -> Fields:
    """Read a JSON object. Raises ModelError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return Fields(path, raw)


def architecture(fields: Fields) -> str:
    """Return the name of the class that the weights are of. Raises ModelError when there is none."""
    names = fields.raw.get("architectures") or [fields.raw.get("model_type", "unknown")]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelError(f"{fields.path}: architectures must be a list of names, is {names!r}")
    return names[0]


def checkpoint_dtype(fields: Fields) -> str:
    """Return the dtype the weights are stored in, or float32, which holds them all: a key of DTYPES."""
    name = str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    return name if name in DTYPES else "float32"


def eos_token_ids(fields: Fields) -> frozenset[int]:
    """Return the end tokens: the generation config's where it names any, as transformers generates by it."""
    directory = fields.path.parent
    path = directory / "generation_config.json"
    value = read_json(path).raw.get("eos_token_id") if path.is_file() else None
    if value is None:
        value = fields.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{directory}: eos_token_id must be an integer or a list of them, is {value!r}")
    return frozenset(ids)
