"""The tensors of a decoder, with Q, K, V and gate, up fused into one matrix each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.invariant_linear import InvariantLinear
from kvhive.worker.linear import Linear
from kvhive.worker.shard import Part, Shard


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norms are [hidden]; those that an architecture does not have are None."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    """[head_dim]."""
    key_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a model, or one rank's part of them (shard.py)."""

    embedding: torch.Tensor
    """[vocab_size, hidden], or the rank's rows of it."""
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor
    head: Linear
    """From hidden to the vocabulary; made of the embedding where the two are tied."""

    def pack(self) -> None:
        """Pack all linear layers, one at a time, so that memory holds one of them twice."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack()


def load_decoder(
    config: DecoderConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device | str,
    invariant: bool = False,
    shard: Shard | None = None,
) -> DecoderWeights:
    """Copy weights, one at a time, into the fused tensors they are parts of.

    invariant: make linear layers whose rows do not depend on the batch
    shard: take this rank's part of each; None: all of it

    Raises ModelError for a tensor that is unknown, missing, doubled or of the wrong shape.
    """
    places = _Places(dtype, device, InvariantLinear if invariant else Linear, shard or Shard())
    model = places.model(config)
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings):
            continue  # derived from the configuration; a copy of the embedding
        places.fill(name, tensor)
    places.finish()
    model.pack()
    return model


class _Place(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    own: torch.Tensor
    """What this rank keeps of it."""
    parts: tuple[Part, ...]
    """Which part of each dimension that is."""

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part, zeros where it reaches beyond the tensor."""
        shape = tuple(part.total for part in self.parts)
        if shape != tensor.shape:
            raise ModelError(f"tensor {name}: needs shape {shape}, has {tuple(tensor.shape)}")
        given = tensor[tuple(part.own for part in self.parts)]
        rows = given.shape[0]
        self.own[:rows].copy_(given)
        self.own[rows:].zero_()


class _Places:
    """Allocates the fused tensors and knows which part of them each checkpoint name fills."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, linear: type[Linear], shard: Shard
    ) -> None:
        self._linear_type = linear
        self._shard = shard
        self._dtype = dtype
        self._device = device
        self._open: dict[str, _Place] = {}
        self._filled: set[str] = set()
        self._offset_norms: list[torch.Tensor] = []
        self._summed_biases: list[torch.Tensor] = []

    def model(self, config: DecoderConfig) -> DecoderWeights:
        """Allocate everything."""
        hidden, vocabulary = _whole(config.hidden_size), self._shard.vocabulary(config)
        embedding = self._stack((hidden,), {"model.embed_tokens.weight": vocabulary})
        layers = tuple(self._layer(config, f"model.layers.{index}") for index in range(config.layers))
        final_norm = self._norm(config, "model.norm", config.hidden_size)
        head = embedding
        if not config.tie_embeddings:
            head = self._stack((hidden,), {"lm_head.weight": vocabulary})
        return DecoderWeights(embedding, layers, final_norm, self._linear_type(head))

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor to its place."""
        if name in self._filled:
            raise ModelError(f"tensor {name}: is in the model twice")
        place = self._open.pop(name, None)
        if place is None:
            raise ModelError(f"tensor {name}: has no place in this model")
        place.fill(name, tensor)
        self._filled.add(name)

    def finish(self) -> None:
        """Insist that every place is filled, and bring tensors into the form in which they are used.

        Norms that are stored as w become 1 + w; a bias that would join each rank's summand joins one.
        """
        if self._open:
            raise ModelError(f"tensor {min(self._open)}: is missing, and {len(self._open) - 1} more")
        for norm in self._offset_norms:
            norm.add_(1)
        for bias in self._summed_biases if self._shard.rank else ():
            bias.zero_()

    def _layer(self, config: DecoderConfig, prefix: str) -> DecoderLayer:
        hidden, inner = config.hidden_size, self._shard.inner(config)
        queries = self._shard.queries(config).times(config.head_dim)
        keys = self._shard.keys(config).times(config.head_dim)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        # Gemma's name for the norm before the feed-forward layer; Llama's is Gemma's for another one.
        before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        query_norm = key_norm = post_attention_norm = post_mlp_norm = None
        if config.qk_norm:
            query_norm = self._norm(config, f"{attention}.q_norm", config.head_dim)
            key_norm = self._norm(config, f"{attention}.k_norm", config.head_dim)
        if config.post_norms:
            post_attention_norm = self._norm(config, f"{prefix}.post_attention_layernorm", hidden)
            post_mlp_norm = self._norm(config, f"{prefix}.post_feedforward_layernorm", hidden)
        return DecoderLayer(
            attention_norm=self._norm(config, f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(qkv, _whole(hidden), config.attention_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._summed(f"{attention}.o_proj", hidden, queries, config.output_bias),
            post_attention_norm=post_attention_norm,
            mlp_norm=self._norm(config, f"{prefix}.{before_mlp}", hidden),
            gate_up=self._linear(gate_up, _whole(hidden), config.mlp_bias),
            down=self._summed(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
            post_mlp_norm=post_mlp_norm,
        )

    def _norm(self, config: DecoderConfig, name: str, size: int) -> torch.Tensor:
        if not config.norm_offset:
            return self._stack((), {f"{name}.weight": _whole(size)})
        # In 16 bits 1 + w would lose most of w.
        norm = torch.empty(size, dtype=torch.float32, device=self._device)
        self._open[f"{name}.weight"] = _Place(norm, (_whole(size),))
        self._offset_norms.append(norm)
        return norm

    def _summed(self, name: str, outputs: int, inputs: Part, biased: bool) -> Linear:
        """Make a layer whose outputs are summed over all ranks: each has some of its inputs."""
        linear = self._linear({name: _whole(outputs)}, inputs, biased)
        if linear.bias is not None:
            self._summed_biases.append(linear.bias)
        return linear

    def _linear(self, parts: dict[str, Part], inputs: Part, biased: bool) -> Linear:
        weight = self._stack((inputs,), {f"{name}.weight": rows for name, rows in parts.items()})
        bias = self._stack((), {f"{name}.bias": rows for name, rows in parts.items()}) if biased else None
        return self._linear_type(weight, bias)

    def _stack(self, trailing: tuple[Part, ...], parts: dict[str, Part]) -> torch.Tensor:
        """Allocate one tensor for the parts below each other and note each part's place in it."""
        counts = [part.count for part in parts.values()]
        shape = (sum(counts), *(part.count for part in trailing))
        try:
            fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:  # torch's only error for "no memory" on the CPU; CUDA's is a subclass
            nbytes = math.prod(shape) * self._dtype.itemsize
            raise ModelError(f"tensor {next(iter(parts))}: {self._device} has no {nbytes} bytes") from error
        for (name, part), own in zip(parts.items(), fused.split(counts), strict=True):
            self._open[name] = _Place(own, (part, *trailing))
        return fused


def _whole(size: int) -> Part:
    return Part(0, size, size)
