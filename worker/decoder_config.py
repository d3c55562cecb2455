"""The shape of a decoder, whatever file it was read from, and what architectures differ in.

One decoder serves Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3: each of their peculiarities is a field
whose default is Llama's way.
"""

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
    """`linear` divides all frequencies by `factor`; `llama3` only low ones, with a smooth edge; `yarn` as
    well, along another edge, and stretches the rotated vectors; `factors` divides each frequency by its own
    entry of `factors` (GGUF's precomputed form of llama3)."""
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    """yarn: turns over the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: turns over the original context below which a frequency is divided by the whole factor."""
    magnitude: float = 1.0
    """yarn: by what the rotated vectors grow, which sharpens attention in long contexts."""
    truncate: bool = True
    """yarn: the edge begins and ends at whole frequencies."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a layer."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder. Sizes are in elements, contexts in tokens."""

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
    rope: Rope
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
    attention_scale: float
    """Factor of the attention's scores; head_dim ** -0.5 but in some Gemmas."""
    activation: str = "silu"
    """Of the feed-forward layer's gate: `silu` or `gelu_tanh`."""
    qk_norm: bool = False
    """Each query and key head is normalised before it is rotated."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + weight, in float32."""
    post_norms: bool = False
    """What attention and feed-forward return is normalised before it joins the residual."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    window: int | None = None
    """Tokens, itself included, that a query of a sliding layer sees; None where no layer slides."""
    sliding_layers: frozenset[int] = frozenset()
    """Indices of the layers that attend within `window`; the others attend to everything."""
    sliding_rope: Rope | None = None
    """Of the sliding layers, where it is not `rope`."""
    attention_softcap: float | None = None
    """Attention scores s become c * tanh(s / c)."""
    final_softcap: float | None = None
    """So do the logits."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers; None is attention to everything."""
        return tuple(dict.fromkeys(self.layer_window(index) for index in range(self.layers)))

    def layer_window(self, index: int) -> int | None:
        """The window of one layer, None where it attends to everything."""
        return self.window if index in self.sliding_layers else None

    def layer_rope(self, index: int) -> Rope:
        """The rotary embedding of one layer."""
        return self.sliding_rope if self.sliding_rope and index in self.sliding_layers else self.rope

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
        if self.sliding_layers and not (self.window and 1 <= self.window <= MAX_SIZE):
            raise ModelError(f"{source}: the sliding window must be 1 to {MAX_SIZE}, is {self.window}")
        positive = [self.rms_norm_eps, self.attention_scale]
        positive += [cap for cap in (self.attention_softcap, self.final_softcap) if cap is not None]
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ModelError(f"{source}: rms_norm_eps, attention scale and soft caps must be above 0")
        for rope in (self.rope, self.sliding_rope):
            if rope is not None:
                self._check_rope(source, rope)

    def _check_rope(self, source: Path, rope: Rope) -> None:
        scaling = rope.scaling
        positive = [rope.theta]
        if scaling is not None:
            positive += [scaling.factor, scaling.low_frequency_factor, *scaling.factors, scaling.magnitude]
            positive += [scaling.high_frequency_factor - scaling.low_frequency_factor, scaling.beta_slow]
            positive += [scaling.beta_fast - scaling.beta_slow, scaling.original_max_context]
            if scaling.kind == "yarn":
                positive.append(rope.theta - 1)  # its logarithm is a divisor
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ModelError(f"{source}: rope theta and rope scaling factors must be above 0")
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(f"{source}: {len(scaling.factors)} rope factors, needs {self.head_dim // 2}")
