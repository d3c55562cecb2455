"""Read what must be known of a model that transformers computes, without torch and without transformers.

The names of the same size differ between families; those below are all that decoder-only ones use. The
loader compares the result with the model that transformers makes, so a wrong guess is refused at start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.config_json import Fields, architecture, checkpoint_dtype, eos_token_ids
from kvhive.worker.decoder_config import MAX_LAYERS, MAX_SIZE

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
_NAMELESS_KEYS = ("transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A model that transformers computes with our attention. Sizes are in elements, contexts in tokens."""

    architecture: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_context: int
    eos_token_ids: frozenset[int]
    checkpoint_dtype: str
    """The dtype the weights are stored in, or the nearest that holds them: a key of DTYPES."""
    windows: tuple[int | None, ...]
    """The sliding windows that its layers may have; None is attention to everything."""
    content: str
    """All of config.json that can matter to a result, as JSON: part of the model's identity."""

    def check(self, source: Path) -> None:
        """Raise ModelError, naming `source`, for a size that cannot be."""
        for name in ("vocab_size", "layers", "kv_heads", "head_dim", "max_context"):
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ModelError(f"{source}: {name} must be 1 to {most}, is {getattr(self, name)}")


def transformers_config_from_json(fields: Fields) -> TransformersConfig:
    """Read the configuration. Raises ModelError, naming the architecture and why, for what cannot work."""
    name = architecture(fields)
    if reason := _unsupported(fields, name):
        raise ModelError(f"{fields.path}: architecture {name!r} is not supported: {reason}")
    layers, heads, hidden = (_first(fields, names) for names in (_LAYERS, _HEADS, _HIDDEN))
    kv_heads = _first(fields, _KV_HEADS, 1 if fields.raw.get("multi_query") else heads)
    window = fields.raw.get("sliding_window")
    content = {key: value for key, value in fields.raw.items() if key not in _NAMELESS_KEYS}
    return TransformersConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        max_context=_first(fields, _CONTEXT),
        eos_token_ids=eos_token_ids(fields),
        checkpoint_dtype=checkpoint_dtype(fields),
        windows=(None,) if window is None else (None, fields.integer("sliding_window")),
        content=json.dumps(content, sort_keys=True),
    )


def _first(fields: Fields, names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        if fields.raw.get(name) is not None:
            return fields.integer(name)
    if default is None:
        name = architecture(fields)
        raise ModelError(f"{fields.path}: architecture {name!r} is not supported: {names[0]} is missing")
    return default


def _unsupported(fields: Fields, name: str) -> str | None:
    """Return why the file alone rules a model out, or None; the loader tests the rest on the model itself."""
    raw = fields.raw
    if raw.get("auto_map"):
        return "it brings its own code, which is never run"
    if raw.get("is_encoder_decoder"):
        return "it has an encoder and a decoder"
    if not name.endswith(_CAUSAL_ENDINGS):
        return f"it does not continue text (its name ends in none of {', '.join(_CAUSAL_ENDINGS)})"
    if raw.get("quantization_config"):
        return "quantized safetensors are not supported"
    types = raw.get("layer_types") or []
    if isinstance(types, list) and (others := sorted({str(each) for each in types} - _LAYER_TYPES)):
        return f"it has layers of type {', '.join(others)}, whose state is not keys and values of a context"
    for kind in _rope_kinds(fields):
        if kind not in _ROPE_KINDS:
            return f"rope scaling {kind!r} depends on the length of the text, so keys cannot be cached"
    return None


def _rope_kinds(fields: Fields) -> list[str]:
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        outer = fields.mapping(name).raw
        inner = [value for value in outer.values() if isinstance(value, dict)]
        found += [str(each.get("rope_type") or each.get("type") or "default") for each in [outer, *inner]]
    return found
