"""The native decoder over a paged KV pool: Llama and its relatives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from kvhive.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from kvhive.kernels.paged_attention import paged_attention
from kvhive.kernels.rms_norm import add_rms_norm, rms_norm
from kvhive.kernels.rotary_and_cache import rotary_and_cache
from kvhive.kernels.vocab_parallel import vocab_parallel_embedding
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.decoder_fusion import fused_layers
from kvhive.worker.decoder_weights import DecoderLayer, load_decoder
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.rank_group import RankGroup
from kvhive.worker.rope import inverse_frequencies, magnitude

_Angles = list[tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines, each [T, head_dim / 2] float32, of each kind of rotary embedding."""


class DecoderModel:
    """Layers of RMSNorm, rotary grouped-query attention and gated feed-forward, as the config says.

    Of several ranks each has a part of every matrix (shard.py) and the whole residual between them. What they
    exchange: two sums a layer, the embedding, and at the end each rank's part of the logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device | str,
        invariant: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        """Take the weights, under their Hugging Face names. Raises ModelError if they do not fit.

        invariant: its linear layers' rows do not depend on the batch
        ranks: those that share the model; each must make the same calls
        """
        self.config = config if ranks is None else ranks.shard.local(config)
        self._ranks = ranks
        self._first_token = 0 if ranks is None else ranks.shard.vocabulary(config).first
        shard = None if ranks is None else ranks.shard
        self._weights = load_decoder(config, weights, dtype, device, invariant, shard)
        ropes = list(dict.fromkeys(config.layer_rope(index) for index in range(config.layers)))
        self._rope_of = [ropes.index(config.layer_rope(index)) for index in range(config.layers)]
        self._windows = [config.layer_window(index) for index in range(config.layers)]
        self._frequencies = [inverse_frequencies(rope, config.head_dim).to(device) for rope in ropes]
        self._magnitudes = [magnitude(rope) for rope in ropes]
        # Rounded to the model's dtype, as in training; on the device, so that a CUDA graph can record it.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device=device)
        self._fused = fused_layers(config, self._weights, self._rope_of) if ranks is None else None
        self._activation = gelu_tanh_and_mul if config.activation == "gelu_tanh" else silu_and_mul

    def forward(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Write the KV of all tokens into the pool and return the logits of the asked rows.

        pool: [blocks, layers, 2, kv_heads, block_size, head_dim]
        Returns [S, vocab_size] in the model's dtype; on ranks but the first, nothing of use.
        """
        eps = self.config.rms_norm_eps
        angles = self._angles(batch.positions)
        residual = self._embed(batch.token_ids)
        hidden = rms_norm(residual, self._weights.layers[0].attention_norm, eps)
        if self._fused is not None and pool.dtype == hidden.dtype:
            hidden = self._fused(
                hidden, residual, angles, pool, batch.attention, batch.slot_mapping, batch.logit_rows
            )
        else:
            hidden = self._layer_by_layer(hidden, residual, angles, batch, pool)[batch.logit_rows]
        logits = self._weights.head(hidden)
        if self._ranks is not None:
            logits = self._ranks.gather(logits)[:, : self.config.vocab_size]
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _layer_by_layer(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        angles: _Angles,
        batch: ForwardBatch,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        pool_layers = pool.unbind(1)
        for index, layer in enumerate(self._weights.layers):
            hidden = self._attention(index, layer, hidden, angles, batch, pool_layers[index])
            if layer.post_attention_norm is not None:
                hidden = rms_norm(hidden, layer.post_attention_norm, eps)
            hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._sum(layer.down(self._activation(layer.gate_up(hidden))))
            if layer.post_mlp_norm is not None:
                hidden = rms_norm(hidden, layer.post_mlp_norm, eps)
            hidden, residual = add_rms_norm(hidden, residual, self._next_norm(index), eps)
        return hidden

    def _angles(self, positions: torch.Tensor) -> _Angles:
        steps = positions[:, None].float()
        angles = [(angle.cos(), angle.sin()) for angle in (steps * each for each in self._frequencies)]
        return [
            (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
            for (cos, sin), factor in zip(angles, self._magnitudes, strict=True)
        ]

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self._weights.embedding
        if self._ranks is None:
            embedded = F.embedding(token_ids, table)
        else:
            embedded = self._ranks.sum(vocab_parallel_embedding(token_ids, table, self._first_token))
        if not self.config.scaled_embedding:
            return embedded
        return embedded * self._embedding_scale

    def _next_norm(self, index: int) -> torch.Tensor:
        """The norm after layer `index`: the next layer's first, or the model's last."""
        layers = self._weights.layers
        return layers[index + 1].attention_norm if index + 1 < len(layers) else self._weights.final_norm

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        angles: _Angles,
        batch: ForwardBatch,
        pool_layer: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = qkv.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            qkv = torch.cat((query, rms_norm(key, layer.key_norm, config.rms_norm_eps), value), dim=1)
        query = rotary_and_cache(qkv, *angles[self._rope_of[index]], pool_layer, batch.slot_mapping)
        attended = paged_attention(
            query,
            pool_layer,
            batch.attention,
            config.attention_scale,
            self._windows[index],
            config.attention_softcap,
        )
        return self._sum(layer.output(attended.reshape(hidden.shape[0], -1)))

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self._ranks is None else self._ranks.sum(partial)
