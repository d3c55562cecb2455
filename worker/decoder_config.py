"""The shape of a Llama model, whatever file it was read from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvhive.proto.errors import ModelError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of each dtype that weights and KV may have."""

MAX_SIZE = 1 << 24
"""Of any dimension and of the context; beyond it a config is damaged, and would ask for absurd memory."""
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed for contexts longer than the model was first trained on."""

    kind: str
    """`linear` divides all frequencies by `factor`; `llama3` only low ones, with a smooth edge;
    `factors` divides each by its own entry of `factors` (GGUF's precomputed form of llama3)."""
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Llama model. Sizes are in elements, contexts in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    """Positions the model was trained for."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    """The output layer is the embedding."""
    attention_bias: bool
    """Q, K, V have biases."""
    output_bias: bool
    """The attention's output projection has one."""
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    """Tokens that end an output."""
    checkpoint_dtype: str
    """The dtype the weights are stored in, or the nearest that holds them: a key of DTYPES."""

    def check(self, source: Path) -> None:
        """Raise ModelError, naming `source`, unless the sizes agree with each other."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
        for name in (*sizes, "max_context"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ModelError(f"{source}: {name} must be 1 to {MAX_SIZE}, is {getattr(self, name)}")
        if self.layers > MAX_LAYERS:
            raise ModelError(f"{source}: layers must be 1 to {MAX_LAYERS}, is {self.layers}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{source}: {self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"{source}: head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        scaling = self.rope_scaling
        positive = [self.rms_norm_eps, self.rope_theta]
        if scaling is not None:
            positive += [scaling.factor, scaling.low_frequency_factor, *scaling.factors]
            positive.append(scaling.high_frequency_factor - scaling.low_frequency_factor)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ModelError(f"{source}: rms_norm_eps, rope theta and rope scaling factors must be above 0")
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(f"{source}: {len(scaling.factors)} rope factors, needs {self.head_dim // 2}")
