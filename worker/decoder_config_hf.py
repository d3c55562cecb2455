"""Read a DecoderConfig from a Hugging Face directory: config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvhive.proto.errors import ModelError
from kvhive.worker.config_json import Fields, architecture, checkpoint_dtype, eos_token_ids
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.rope_config_hf import gemma3_ropes, rope_of

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes without saying so in config.json."""

    sliding: str = ""
    """Which layers slide: "" none, `all`, `upper` (from max_window_layers on), or `pattern`."""
    pattern: int = 0
    """Every so many layers, one does not slide."""
    qkv_bias: bool = False
    """Q, K, V have biases and the output projection has none."""
    qk_norm: bool = False
    gemma: bool = False
    """Norms, embedding, activation and attention scale as Gemma 2 and 3 have them."""
    head_dim: int = 0
    """Where config.json does not say; 0 is hidden_size / heads."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "MistralForCausalLM": Family(sliding="all"),
        "Qwen2ForCausalLM": Family(sliding="upper", qkv_bias=True),
        "Qwen3ForCausalLM": Family(sliding="upper", qk_norm=True, head_dim=128),
        "Gemma2ForCausalLM": Family(sliding="pattern", pattern=2, gemma=True, head_dim=256),
        "Gemma3ForCausalLM": Family(sliding="pattern", pattern=6, gemma=True, qk_norm=True, head_dim=256),
    }
)
"""The architectures of the native decoder, by the name of transformers' class."""


def decoder_config_from_json(fields: Fields) -> DecoderConfig:
    """Read the configuration of one of FAMILIES. Raises ModelError for what is missing or unsupported."""
    name = architecture(fields)
    family = FAMILIES[name]
    activation = _check_supported(fields, family)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", family.head_dim or hidden // max(heads, 1))
    bias = fields.flag("attention_bias")
    window, sliding_layers = _sliding(fields, family, layers)
    rope, sliding_rope = gemma3_ropes(fields) if name == "Gemma3ForCausalLM" else (rope_of(fields), None)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_context=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", family.gemma),
        attention_bias=bias or family.qkv_bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        eos_token_ids=eos_token_ids(fields),
        checkpoint_dtype=checkpoint_dtype(fields),
        attention_scale=_attention_scale(fields, family, head_dim),
        activation=activation,
        qk_norm=family.qk_norm,
        norm_offset=family.gemma,
        post_norms=family.gemma,
        scaled_embedding=family.gemma,
        window=window,
        sliding_layers=sliding_layers,
        sliding_rope=None if sliding_rope == rope else sliding_rope,
        attention_softcap=fields.optional_number("attn_logit_softcapping") if family.gemma else None,
        final_softcap=fields.optional_number("final_logit_softcapping") if family.gemma else None,
    )


def _check_supported(fields: Fields, family: Family) -> str:
    """Refuse what would be computed wrongly; return our name of the activation."""
    raw, path = fields.raw, fields.path
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized safetensors are not supported")
    if raw.get("use_bidirectional_attention"):
        raise ModelError(f"{path}: use_bidirectional_attention is not supported, answers are causal")
    if not family.sliding and raw.get("sliding_window") is not None:
        raise ModelError(f"{path}: {architecture(fields)} has no sliding_window, yet the file says one")
    if family.gemma:
        activation = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    else:
        activation = raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[activation]


def _attention_scale(fields: Fields, family: Family, head_dim: int) -> float:
    scalar = fields.number("query_pre_attn_scalar", 256) if family.gemma else float(head_dim)
    # Whatever is not above zero is refused by the config's own check.
    return scalar**-0.5 if scalar > 0 else 0.0


def _sliding(fields: Fields, family: Family, layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the window and the layers that attend within it."""
    switched_off = family.sliding == "upper" and not fields.flag("use_sliding_window")
    if not family.sliding or switched_off or fields.raw.get("sliding_window") is None:
        return None, frozenset()
    window, types = fields.integer("sliding_window"), fields.raw.get("layer_types")
    every = range(min(layers, 1 << 16))
    if family.sliding == "all":
        return window, frozenset(every)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or {*types} - _LAYER_TYPES:
            raise ModelError(
                f"{fields.path}: layer_types must name {layers} layers {sorted(_LAYER_TYPES)}, is {types!r}"
            )
        return window, frozenset(index for index in every if types[index] == "sliding_attention")
    if family.sliding == "upper":
        first = fields.integer("max_window_layers", 28)
        return window, frozenset(index for index in every if index >= first)
    pattern = fields.integer("sliding_window_pattern", family.pattern)
    return window, frozenset(index for index in every if (index + 1) % max(pattern, 1))
