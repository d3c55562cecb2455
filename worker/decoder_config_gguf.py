"""Read a DecoderConfig from the metadata of a GGUF file."""

from __future__ import annotations

import struct
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig, RopeScaling
from kvhive.worker.gguf_file import GgufFile, read_gguf

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor in which llama.cpp's converter stores llama3 scaling, one divisor per rotary pair."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FILE_DTYPES = {0: "float32", 1: "float16"}
_REQUIRED = object()


def config_from_gguf(path: Path) -> DecoderConfig:
    """Read the configuration. Raises ModelError for what is missing, malformed or not a plain Llama."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture", "unknown")
    if architecture != "llama":
        raise ModelError(f"{path}: architecture {architecture!r} is not supported, 'llama' is")
    if _integer(file, "llama.expert_count", 0) > 0:
        raise ModelError(f"{path}: mixture-of-experts models are not supported")
    if _integer(file, "llama.attention.sliding_window", 0) > 0:
        raise ModelError(f"{path}: sliding_window attention is not supported")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    heads = _integer(file, "llama.attention.head_count")
    hidden = _integer(file, "llama.embedding_length")
    head_dim = _integer(file, "llama.attention.key_length", hidden // max(heads, 1))
    if _integer(file, "llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: partial rotary embedding is not supported")
    return DecoderConfig(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=_integer(file, "llama.feed_forward_length"),
        layers=_integer(file, "llama.block_count"),
        heads=heads,
        kv_heads=_integer(file, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=_integer(file, "llama.context_length"),
        rms_norm_eps=_number(file, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_number(file, "llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=frozenset(
            _integer(file, f"tokenizer.ggml.{key}")
            for key in _END_KEYS
            if f"tokenizer.ggml.{key}" in file.metadata
        ),
        checkpoint_dtype=_FILE_DTYPES.get(_integer(file, "general.file_type", -1), "bfloat16"),
    )


def _integer(file: GgufFile, key: str, default: object = _REQUIRED) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{file.path}: {key} {'is missing' if value is _REQUIRED else f'is {value!r}'}")
    return value


def _number(file: GgufFile, key: str, default: object = _REQUIRED) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{file.path}: {key} {'is missing' if value is _REQUIRED else f'is {value!r}'}")
    return float(value)


def _rope_scaling(file: GgufFile) -> RopeScaling | None:
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            if tensor.kind != "F32":
                raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} must be F32, is {tensor.kind}")
            with file.path.open("rb") as stream:
                stream.seek(tensor.offset)
                raw = stream.read(tensor.nbytes)
            return RopeScaling("factors", factors=struct.unpack(f"<{len(raw) // 4}f", raw))
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", _number(file, "llama.rope.scaling.factor"))
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; none and linear are")
