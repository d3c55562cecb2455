"""Read a DecoderConfig from a Hugging Face directory: config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DTYPES, DecoderConfig, RopeScaling

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_REQUIRED = object()


def config_from_directory(directory: Path) -> DecoderConfig:
    """Read the configuration. Raises ModelError for what is missing, malformed or not a plain Llama."""
    path = directory / "config.json"
    raw = _read(path)
    architectures = raw.get("architectures") or [raw.get("model_type", "unknown")]
    if not isinstance(architectures, list) or architectures[0] not in _ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architectures} is not supported, {_ARCHITECTURES} are")
    _refuse_unsupported(path, raw)
    fields = _Fields(path, raw)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    bias = bool(raw.get("attention_bias", False))
    theta, scaling = _rope(fields)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        max_context=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=_eos(directory, raw),
        checkpoint_dtype=dtype if dtype in DTYPES else "float32",
    )


class _Fields:
    """Typed access to a JSON mapping; a value of the wrong type is a ModelError that names it."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, name: str, default: object = _REQUIRED) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} must be an integer, is {value!r}")
        return value

    def number(self, name: str, default: object = _REQUIRED) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} must be a number, is {value!r}")
        return float(value)

    def _get(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {name} is missing")
            return default
        return value


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return raw


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    if raw.get("sliding_window") is not None:
        raise ModelError(f"{path}: sliding_window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported, silu is")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized safetensors are not supported")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    raw, path = fields.raw, fields.path
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"{path}: rope_parameters must be a mapping, is {scaling!r}")
    theta = _Fields(path, scaling).number("rope_theta", raw.get("rope_theta") or 10000.0)
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{path}: partial rotary embedding is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    inner = _Fields(path, scaling)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", inner.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.integer("original_max_position_embeddings"),
        )
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported; default, linear and llama3 are")


def _eos(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Return the end tokens: the generation config's where it names any, as transformers generates by it."""
    path = directory / "generation_config.json"
    value = _read(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{directory}: eos_token_id must be an integer or a list of them, is {value!r}")
    return frozenset(ids)
