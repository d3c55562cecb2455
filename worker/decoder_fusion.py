"""A decoder's layers as one operator, where the device has such a thing."""

from __future__ import annotations

from collections.abc import Sequence

from kvhive.kernels.decoder_layers import FusedLayers, LayerParts, LayersShape, Projection
from kvhive.kernels.operators import operators_for
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.decoder_weights import DecoderWeights
from kvhive.worker.linear import Linear


def fused_layers(
    config: DecoderConfig, weights: DecoderWeights, rope_of: Sequence[int]
) -> FusedLayers | None:
    """Return the layers as one operator, or None where they must be computed one operator at a time.

    rope_of: for each layer, which of the rotary embeddings it has
    """
    layers, shape = weights.layers, _shape(config)
    next_norms = [*(layer.attention_norm for layer in layers[1:]), weights.final_norm]
    parts = []
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        projections = [_projection(one) for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        known = [projection for projection in projections if projection is not None]
        if len(known) < len(projections):
            return None
        qkv, output, gate_up, down = known
        parts.append(
            LayerParts(
                qkv=qkv,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                output=output,
                post_attention_norm=layer.post_attention_norm,
                mlp_norm=layer.mlp_norm,
                gate_up=gate_up,
                down=down,
                post_mlp_norm=layer.post_mlp_norm,
                next_norm=next_norm,
                rope=rope_of[index],
                window=config.layer_window(index),
            )
        )
    return operators_for(weights.final_norm).fuse_layers(parts, shape)


def _shape(config: DecoderConfig) -> LayersShape:
    return LayersShape(
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        softcap=config.attention_softcap,
        gelu=config.activation == "gelu_tanh",
    )


def _projection(linear: Linear) -> Projection | None:
    return None if linear.packed is None else Projection(linear.packed, linear.bias)
