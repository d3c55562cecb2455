"""Read a DecoderConfig from the metadata of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig, Rope, RopeScaling
from kvhive.worker.gguf_file import GgufFile, read_gguf
from kvhive.worker.rope_config_hf import yarn_magnitude

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor in which llama.cpp's converter stores llama3 scaling, one divisor per rotary pair."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FILE_DTYPES = {0: "float32", 1: "float16"}
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp takes for granted of an architecture."""

    interleaved: bool = False
    """The converter reorders rows of Q and K into interleaved rotary pairs."""
    pattern: int = 1
    """Every so many layers, one does not slide; 1 where all slide once a window is given."""
    slides: bool = False
    """The architecture has sliding windows at all."""
    gemma: bool = False
    qk_norm: bool = False
    softcaps: tuple[float | None, float | None] = (None, None)
    """Of attention and of logits, where the file does not say."""
    wide_scale_layers: int = 0
    """So many layers mean the 27 B model, whose attention scale is (hidden / heads) ** -0.5."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # Mistral's files say llama; of the two only Mistral's have a window, and there every layer slides.
        "llama": Family(interleaved=True, slides=True),
        "qwen2": Family(),
        "qwen3": Family(qk_norm=True),
        "gemma2": Family(gemma=True, slides=True, pattern=2, softcaps=(50.0, 30.0), wide_scale_layers=46),
        "gemma3": Family(gemma=True, slides=True, pattern=6, qk_norm=True, wide_scale_layers=62),
    }
)
"""The architectures that are read, by the name in general.architecture."""


def config_from_gguf(path: Path) -> DecoderConfig:
    """Read the configuration. Raises ModelError for what is missing, malformed or not supported."""
    file = read_gguf(path)
    name = architecture_of(file)
    family, keys = FAMILIES[name], _Keys(file, name)
    if keys.integer("expert_count", 0) > 0:
        raise ModelError(f"{path}: mixture-of-experts models in GGUF are not supported")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    layers, heads = keys.integer("block_count"), keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: partial rotary embedding is not supported")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: keys and values of different lengths are not supported")
    window, sliding_layers = _sliding(keys, family, layers)
    rope = _rope(keys)
    local = Rope(keys.number("rope.freq_base_swa", 10000.0)) if name == "gemma3" else rope
    attention_cap, final_cap = family.softcaps
    return DecoderConfig(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=_eos(file),
        checkpoint_dtype=_FILE_DTYPES.get(_integer(file, "general.file_type", -1), "bfloat16"),
        attention_scale=_attention_scale(keys, family, hidden, heads, head_dim, layers),
        activation="gelu_tanh" if family.gemma else "silu",
        qk_norm=family.qk_norm,
        norm_offset=family.gemma,
        post_norms=family.gemma,
        scaled_embedding=family.gemma,
        window=window,
        sliding_layers=sliding_layers,
        sliding_rope=None if local == rope or not sliding_layers else local,
        attention_softcap=keys.optional_number("attn_logit_softcapping", attention_cap),
        final_softcap=keys.optional_number("final_logit_softcapping", final_cap),
    )


def architecture_of(file: GgufFile) -> str:
    """Return the key of FAMILIES that a file is of. Raises ModelError, naming the architecture."""
    name = file.metadata.get("general.architecture", "unknown")
    if name not in FAMILIES:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported in GGUF; {', '.join(FAMILIES)} are"
        )
    return str(name)


class _Keys:
    """The metadata below the architecture's name."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix

    def integer(self, key: str, default: object = _REQUIRED) -> int:
        return _integer(self.file, f"{self._prefix}.{key}", default)

    def number(self, key: str, default: object = _REQUIRED) -> float:
        key = f"{self._prefix}.{key}"
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(
                f"{self.file.path}: {key} {'is missing' if value is _REQUIRED else f'is {value!r}'}"
            )
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        return self.number(key, default) if self.has(key) else default

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self.file.metadata

    def raw(self, key: str, default: object) -> object:
        return self.file.metadata.get(f"{self._prefix}.{key}", default)


def _integer(file: GgufFile, key: str, default: object = _REQUIRED) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{file.path}: {key} {'is missing' if value is _REQUIRED else f'is {value!r}'}")
    return value


def _eos(file: GgufFile) -> frozenset[int]:
    keys = (f"tokenizer.ggml.{key}" for key in _END_KEYS)
    return frozenset(_integer(file, key) for key in keys if key in file.metadata)


def _attention_scale(
    keys: _Keys, family: Family, hidden: int, heads: int, head_dim: int, layers: int
) -> float:
    """Return the file's scale, or what llama.cpp takes: the key is newer than most files."""
    width = hidden // max(heads, 1) if layers == family.wide_scale_layers else head_dim
    default = width**-0.5 if width > 0 else 0.0
    return keys.number("attention.scale", default) or default


def _sliding(keys: _Keys, family: Family, layers: int) -> tuple[int | None, frozenset[int]]:
    window = keys.integer("attention.sliding_window", 0)
    if not family.slides or window <= 0:
        return None, frozenset()
    every = range(min(layers, 1 << 16))
    pattern = keys.raw("attention.sliding_window_pattern", family.pattern)
    if isinstance(pattern, tuple):
        if len(pattern) != layers:
            raise ModelError(f"{keys.file.path}: sliding_window_pattern needs {layers} entries")
        return window, frozenset(index for index in every if pattern[index])
    if not isinstance(pattern, int) or pattern < 1:
        raise ModelError(f"{keys.file.path}: sliding_window_pattern is {pattern!r}")
    return window, frozenset(index for index in every if pattern == 1 or (index + 1) % pattern)


def _rope(keys: _Keys) -> Rope:
    """Read the embedding of the layers that do not slide."""
    file = keys.file
    theta = keys.number("rope.freq_base", 10000.0)
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            if tensor.kind != "F32":
                raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} must be F32, is {tensor.kind}")
            with file.path.open("rb") as stream:
                stream.seek(tensor.offset)
                raw = stream.read(tensor.nbytes)
            return Rope(theta, RopeScaling("factors", factors=struct.unpack(f"<{len(raw) // 4}f", raw)))
    kind = keys.raw("rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", keys.number("rope.scaling.factor")))
    if kind == "yarn":
        factor = keys.number("rope.scaling.factor")
        return Rope(
            theta,
            RopeScaling(
                "yarn",
                factor,
                original_max_context=keys.integer("rope.scaling.original_context_length"),
                beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
                magnitude=keys.number("rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor),
            ),
        )
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; none, linear and yarn are")
