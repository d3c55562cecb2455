"""The Llama model over a paged KV pool."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from kvhive.kernels.activation import silu_and_mul
from kvhive.kernels.paged_attention import paged_attention
from kvhive.kernels.reshape_and_cache import reshape_and_cache
from kvhive.kernels.rms_norm import add_rms_norm, rms_norm
from kvhive.kernels.rotary_embedding import rotary_embedding
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.decoder_weights import DecoderLayer, load_decoder
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.rope import inverse_frequencies


class DecoderModel:
    """A decoder of RMSNorm, rotary grouped-query attention and SiLU-gated feed-forward layers."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Take the weights, under their Hugging Face names. Raises ModelError if they do not fit."""
        self.config = config
        self._weights = load_decoder(config, weights, dtype, device)
        self._frequencies = inverse_frequencies(config).to(device)
        self._scale = config.head_dim**-0.5

    def forward(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Write the KV of all tokens into the pool and return the logits of the asked rows.

        pool: [blocks, layers, 2, kv_heads, block_size, head_dim]
        Returns [S, vocab_size] in the model's dtype.
        """
        angles = batch.positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        residual = F.embedding(batch.token_ids, self._weights.embedding)
        hidden = rms_norm(residual, self._weights.layers[0].attention_norm, self.config.rms_norm_eps)
        for index, layer in enumerate(self._weights.layers):
            hidden = self._attention(layer, hidden, cos, sin, batch, pool[:, index])
            hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, self.config.rms_norm_eps)
            hidden = layer.down(silu_and_mul(layer.gate_up(hidden)))
            hidden, residual = add_rms_norm(
                hidden, residual, self._next_norm(index), self.config.rms_norm_eps
            )
        return self._weights.head(hidden[batch.logit_rows])

    def _next_norm(self, index: int) -> torch.Tensor:
        """The norm after layer `index`: the next layer's first, or the model's last."""
        layers = self._weights.layers
        return layers[index + 1].attention_norm if index + 1 < len(layers) else self._weights.final_norm

    def _attention(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        pool_layer: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        # Query and key heads lie side by side and turn by the same angles: one call for both.
        turned = rotary_embedding(qkv[:, : config.heads + config.kv_heads], cos, sin)
        query, key = turned.split((config.heads, config.kv_heads), dim=1)
        reshape_and_cache(key, qkv[:, config.heads + config.kv_heads :], pool_layer, batch.slot_mapping)
        attended = paged_attention(query, pool_layer, batch.attention, self._scale)
        return layer.output(attended.reshape(hidden.shape[0], -1))
