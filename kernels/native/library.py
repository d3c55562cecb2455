"""The C++ functions as Python calls: signatures, and the structures that both sides know.

What each function does stands above it in the sources. Pointers are integers, from Tensor.data_ptr().
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""Their numbers in calls, as in parallel.h."""

STORED = (torch.float32, torch.bfloat16)
"""Those of weights, activations and KV."""


class AttentionCall(ctypes.Structure):
    """Mirrors the struct of the same name in attention_work.h."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("query_stride", c_int64),
        ("block_stride", c_int64),
        ("window", c_int64),
        ("dtype", c_int64),
        ("threads", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
    ]


class Stream(ctypes.Structure):
    """Mirrors the struct of the same name in sampling.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("low", c_uint32),
        ("high", c_uint32),
        ("choice", c_uint32),
        ("position", c_uint32),
    ]


class AttentionOfStep(ctypes.Structure):
    """Mirrors Attention in decoder_layers.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("call", c_void_p),
        ("work", c_void_p),
        ("scratch", c_void_p),
    ]


class LinearCall(ctypes.Structure):
    """Mirrors LinearLayer in decoder_layers.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("halves", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
    ]


class DecoderLayerCall(ctypes.Structure):
    """Mirrors DecoderLayer in decoder_layers.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("qkv", LinearCall),
        ("output", LinearCall),
        ("gate_up", LinearCall),
        ("down", LinearCall),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("next_norm", c_void_p),
        ("rope", c_int64),
        ("attention", c_int64),
    ]


class LayersCall(ctypes.Structure):
    """Mirrors Step in decoder_layers.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("layers", "attentions", "angles", "slots", "rows")),
        *((name, c_void_p) for name in ("hidden", "residual", "qkv", "wide", "gated", "pool")),
        *((name, c_int64) for name in ("row_count", "rows_attention")),
        *((name, c_int64) for name in ("layer_count", "tokens", "blocks", "block_stride", "layer_stride")),
        *((name, c_int64) for name in ("block_size", "heads", "kv_heads", "head_dim", "hidden_size")),
        *((name, c_int64) for name in ("dtype", "norm_dtype", "gelu", "threads")),
        ("eps", c_double),
    ]


_CALL = POINTER(AttentionCall)
_N = c_int64
_P = c_void_p

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvhive_rms_norm": (None, (_N, _N, _P, _P, _P, _P, _N, _N, _N, _N, _N, c_float, _N)),
    "kvhive_silu_and_mul": (None, (_N, _P, _P, _N, _N, _N)),
    "kvhive_gelu_tanh_and_mul": (None, (_N, _P, _P, _N, _N, _N)),
    "kvhive_rotary": (None, (_N, _P, _P, _P, _P, _N, _N, _N, _N, _N)),
    "kvhive_rotary_and_cache": (c_int, (_N, _P, _P, _P, _P, _N, _N, _N, _N, _P, _N, _N, _N, _N)),
    "kvhive_reshape_and_cache": (c_int, (_N, _P, _P, _N, _N, _P, _N, _N, _N, _N, _P, _N, _N, _N)),
    "kvhive_copy_blocks": (c_int, (_P, _P, _N, _P, _P, _N, _N, _N, _N)),
    "kvhive_packed_size": (_N, (_N, _N, _N)),
    "kvhive_pack_whole": (None, (_P, _P, _N, _N, _N)),
    "kvhive_pack_halves": (None, (_P, _P, _N, _N, _N)),
    "kvhive_linear": (None, (_N, _N, _P, _P, _P, _P, _N, _N, _N, _N)),
    "kvhive_decoder_layers": (c_int, (POINTER(LayersCall),)),
    "kvhive_team_try": (None, (_N, _N, _P, _P)),
    "kvhive_greedy": (None, (_N, _P, _P, _P, _N, _N, _N)),
    "kvhive_gumbel_scratch": (_N, (_N, _N)),
    "kvhive_gumbel_argmax": (None, (_N, _P, _P, _P, _P, _N, _N, _N)),
    "kvhive_attention_divide": (_P, (_CALL,)),
    "kvhive_attention_forget": (None, (_P,)),
    "kvhive_attention_scratch": (_N, (_CALL, _P)),
    "kvhive_attention": (None, (_CALL, _P, _P, _P, _P, _P)),
}


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library and say what its functions take. Raises OSError when it is not one of ours."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path}: has no {name}") from error
        function.restype, function.argtypes = result, arguments
    return library
