"""The shape of a Llama model, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvhive.proto.errors import ModelError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of each dtype that weights and KV may have."""


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
class LlamaConfig:
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
            if getattr(self, name) < 1:
                raise ModelError(f"{source}: {name} must be at least 1, is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{source}: {self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"{source}: head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        scaling = self.rope_scaling
        if not self.rope_theta > 0 or (scaling is not None and not scaling.factor > 0):
            raise ModelError(f"{source}: rope theta and scaling factor must be above 0")
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(f"{source}: {len(scaling.factors)} rope factors, needs {self.head_dim // 2}")
