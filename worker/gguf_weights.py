"""Read weights from a GGUF file, under Hugging Face names and in Hugging Face's layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.decoder_config_gguf import FAMILIES, ROPE_FACTORS, architecture_of
from kvhive.worker.gguf_file import GgufTensor, read_gguf

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_INSIDE = _INSIDE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROWS_AT_ONCE = 16
"""Of what gguf.quants.dequantize is given."""
_VALUES_AT_ONCE = 1 << 19
"""2 MiB: beyond that it takes more memory and no less time."""


def iterate_gguf(path: Path, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 tensor). Raises ModelError that names the file and the tensor."""
    file = read_gguf(path)
    family = FAMILIES[architecture_of(file)]
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            continue  # part of the configuration
        name = _hugging_face_name(tensor.name, _GEMMA_INSIDE if family.gemma else _INSIDE)
        if name is None:
            raise ModelError(f"{path}: tensor {tensor.name} is not known in this architecture")
        values = _read(path, tensor)
        if family.interleaved and ".q_proj." in name:
            values = _undo_permutation(path, tensor, values, config.heads)
        elif family.interleaved and ".k_proj." in name:
            values = _undo_permutation(path, tensor, values, config.kv_heads)
        elif family.gemma and name.endswith("norm.weight"):
            values -= 1  # the converter stores what the norm multiplies by
        yield name, torch.from_numpy(values)


def _hugging_face_name(name: str, inside: Mapping[str, str]) -> str | None:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _OUTSIDE:
        return f"{_OUTSIDE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in inside:
        return f"model.layers.{parts[1]}.{inside[parts[2]]}.{parts[3]}"
    return None


def _read(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Read one tensor as a float32 array of its own."""
    kind = GGMLQuantizationType[tensor.kind]
    try:
        raw = np.fromfile(path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
    except OSError as error:
        raise ModelError(f"{path}: tensor {tensor.name} cannot be read: {error}") from error
    if raw.size != tensor.nbytes:
        raise ModelError(f"{path}: damaged or truncated: tensor {tensor.name} ends beyond the file")
    try:
        values = dequantize(raw.reshape(_rows(tensor), -1), kind)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"{path}: tensor {tensor.name} of type {tensor.kind} is not supported") from error
    # A copy where dequantize has none to make: torch takes only writable, contiguous arrays.
    return np.require(values.reshape(tensor.shape), np.float32, ["C", "W"])


def _rows(tensor: GgufTensor) -> int:
    """In how many rows to dequantize: each 16 of them take their time in Python, however short they are.

    A row ends where a block does, so that several of them in one give the same values.
    """
    rows = math.prod(tensor.shape[:-1])
    together = max(1, _VALUES_AT_ONCE // (_ROWS_AT_ONCE * max(1, tensor.shape[-1])))
    return rows // math.gcd(rows, 1 << (together.bit_length() - 1))


def _undo_permutation(path: Path, tensor: GgufTensor, values: np.ndarray, heads: int) -> np.ndarray:
    """Bring rows of Q or K from llama.cpp's interleaved rotary pairs back to "rotate half".

    The converter reshapes each head's rows to [2, head_dim / 2] and swaps the two axes; so does this, back.
    """
    rows = values.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{path}: tensor {tensor.name} has {rows} rows, which {heads} heads cannot share")
    paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
