"""A model whose layers transformers computes, with our attention over our pool in place of its own.

    packed tokens [1, T] -> transformers' forward -> per layer: attend(q, k, v) -> paged attention

transformers lets attention be replaced by name. What our attention ignores would be silently wrong, so a
model is accepted only after its logits for a short text, cut up as the engine does it, equal those that it
computes with transformers' own attention.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from kvhive.kernels.paged_attention import paged_attention
from kvhive.kernels.reshape_and_cache import reshape_and_cache
from kvhive.proto.errors import ModelError
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.transformers_config import TransformersConfig

ATTENTION = "kvhive_paged"
"""The name under which transformers finds our attention."""
_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
        "logits_to_keep",
        "layer_idx",
        "position_embeddings",
    }
)
"""Arguments that models pass on to attention and that change nothing in it."""


@dataclass(slots=True)
class _Step:
    """What attention must know of the step under way, beyond what transformers passes it."""

    batch: ForwardBatch
    pool: torch.Tensor
    windows: dict[int, int | None] = field(default_factory=dict)
    """By layer, the sliding window that it asked for."""


# transformers calls attention by its registered name, with nothing of ours at hand but the context.
_STEP: ContextVar[_Step] = ContextVar("kvhive_step")


class TransformersModel:
    """Implements LanguageModel for one checkpoint."""

    def __init__(
        self, path: Path, config: TransformersConfig, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Load safetensors from a directory; runs no code of the model's. Raises ModelError that says why."""
        self.config = config
        AttentionInterface.register(ATTENTION, _attend)
        self.network = _load(path, config, dtype).to(device).eval()
        _check_vocabulary(path, config, self.network)
        self._keeps_rows = "logits_to_keep" in inspect.signature(self.network.forward).parameters

    def forward(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Write the KV of all tokens into the pool and return the logits of the asked rows.

        pool: [blocks, layers, 2, kv_heads, block_size, head_dim]
        Returns [S, vocab_size]. Raises ModelError when the model calls for attention that ours is not.
        """
        return self.traced(batch, pool)[0]

    def traced(self, batch: ForwardBatch, pool: torch.Tensor) -> tuple[torch.Tensor, dict[int, int | None]]:
        """Do the same and return as well, by layer, the sliding window that it asked for."""
        rows = {"logits_to_keep": batch.logit_rows} if self._keeps_rows else {}
        step = _Step(batch, pool)
        token = _STEP.set(step)
        try:
            output = self.network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **rows,
            )
        finally:
            _STEP.reset(token)
        if sorted(step.windows) != list(range(self.config.layers)):
            raise ModelError(f"of {self.config.layers} layers, those that attend are {sorted(step.windows)}")
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[batch.logit_rows], step.windows


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim].

    Returns [1, T, heads, head_dim] and no weights.
    """
    step = _STEP.get()
    window, softcap = others.pop("sliding_window", None), others.pop("softcap", None)
    causal = others.pop("is_causal", None) is not False and getattr(module, "is_causal", True) is not False
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or dropout or not causal:
        asked = unknown or ["dropout" if dropout else "a mask of its own" if causal else "the future"]
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(asked)}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < step.pool.shape[1] or layer in step.windows:
        raise ModelError(f"{type(module).__name__} does not say which layer it is of ({layer!r})")
    step.windows[layer] = window
    pool_layer = step.pool[:, layer]
    expected = (1, pool_layer.shape[2], query.shape[2], pool_layer.shape[4])
    if key.shape != expected or value.shape != expected:
        raise ModelError(
            f"{type(module).__name__} has keys {tuple(key.shape)} and values {tuple(value.shape)}, "
            f"config.json says {expected}"
        )
    packed = [each[0].transpose(0, 1).to(step.pool.dtype) for each in (query, key, value)]
    reshape_and_cache(packed[1], packed[2], pool_layer, step.batch.slot_mapping)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attended = paged_attention(
        packed[0].contiguous(), pool_layer, step.batch.attention, scale, window, softcap
    )
    return attended[None].to(query.dtype), None


def _load(path: Path, config: TransformersConfig, dtype: torch.dtype) -> Any:
    """Make the network; every way in which transformers refuses is a ModelError."""
    refusal = f"{path}: architecture {config.architecture!r} is not supported"
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        own = AutoConfig.from_pretrained(path, **local)
        kind = AutoModelForCausalLM._model_mapping.get(type(own), None)
        if kind is None:
            raise ModelError(f"{refusal}: transformers has no causal language model of this configuration")
        if kind.__name__ != config.architecture:
            raise ModelError(f"{refusal}: transformers would read it as {kind.__name__}")
        if getattr(kind, "_is_stateful", False):
            raise ModelError(f"{refusal}: its layers keep a recurrent state beside keys and values")
        if not getattr(kind, "_supports_attention_backend", False):
            raise ModelError(f"{refusal}: its attention cannot be replaced")
        network, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=own,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
            **local,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{refusal}: transformers cannot load it: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[what]:
            raise ModelError(f"{path}: {what.replace('_', ' ')}: {sorted(map(str, loading[what]))[:3]}")
    return network


def _check_vocabulary(path: Path, config: TransformersConfig, network: Any) -> None:
    head = network.get_output_embeddings()
    if head is None or head.weight.shape[0] != config.vocab_size:
        raise ModelError(
            f"{path}: architecture {config.architecture!r} is not supported: "
            f"its output layer is not of {config.vocab_size} tokens"
        )
