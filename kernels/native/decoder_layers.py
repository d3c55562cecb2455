"""All layers of a decoder in one call of the C++ (decoder_layers.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata, each_alone
from kvhive.kernels.decoder_layers import LayerParts, LayersShape, Projection
from kvhive.kernels.native.attention_plan import AttentionPlan, attention_plan
from kvhive.kernels.native.library import (
    DTYPES,
    STORED,
    AttentionOfStep,
    DecoderLayerCall,
    LayersCall,
    LinearCall,
)
from kvhive.kernels.native.linear import NativeLinear

LEAST_TOKENS_PER_ROW = 4
"""Rows that share no keys with their neighbours take longer each."""


class NativeLayers:
    """Implements FusedLayers."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerParts], shape: LayersShape) -> None:
        """Take layers whose linear layers are all NativeLinear, and whose norms are of one dtype."""
        self._library = library
        self._shape = shape
        self._kept = layers  # the C++ knows the addresses of their tensors only
        self._windows = list(dict.fromkeys(layer.window for layer in layers))
        calls = [_layer_call(layer, self._windows.index(layer.window)) for layer in layers]
        self._layers = (DecoderLayerCall * len(calls))(*calls)
        self._norm_dtype = DTYPES[layers[0].mlp_norm.dtype]
        self._wide = max(max(layer.gate_up.outputs, layer.output.inputs) for layer in self._layers)
        self._gated = max(layer.down.inputs for layer in self._layers)
        self._memory = torch.empty(0)

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        pool: torch.Tensor,
        metadata: AttentionMetadata,
        slot_mapping: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See FusedLayers."""
        shape, tokens = self._shape, hidden.shape[0]
        qkv, wide, gated = self._scratch(hidden)
        few = _few(rows, tokens)
        plans = self._plans(qkv[:, : shape.heads], pool[:, 0], metadata, rows if few else rows[:0])
        attentions = (AttentionOfStep * len(plans))(*(plan.of_step() for plan in plans))
        pointers = [table.data_ptr() for pair in angles for table in pair]
        call = LayersCall(
            layers=ctypes.addressof(self._layers),
            attentions=ctypes.addressof(attentions),
            angles=ctypes.addressof(addresses := (ctypes.c_void_p * len(pointers))(*pointers)),
            slots=slot_mapping.data_ptr(),
            rows=rows.data_ptr(),
            hidden=hidden.data_ptr(),
            residual=residual.data_ptr(),
            qkv=qkv.data_ptr(),
            wide=wide.data_ptr(),
            gated=gated.data_ptr(),
            pool=pool.data_ptr(),
            row_count=len(rows) if few else tokens,
            rows_attention=len(plans) - 1,
            layer_count=len(self._layers),
            tokens=tokens,
            blocks=pool.shape[0],
            block_stride=pool.stride(0),
            layer_stride=pool.stride(1),
            block_size=pool.shape[4],
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            dtype=DTYPES[hidden.dtype],
            norm_dtype=self._norm_dtype,
            gelu=shape.gelu,
            threads=torch.get_num_threads(),
            eps=shape.eps,
        )
        outside = self._library.kvhive_decoder_layers(ctypes.byref(call))
        del addresses, attentions  # not before: the call read them
        if outside:
            raise IndexError(f"slot_mapping: a slot is outside the pool of {pool.shape[0] * pool.shape[4]}")
        return hidden[: len(rows)] if few else hidden[rows]

    def _plans(
        self, query: torch.Tensor, pool_layer: torch.Tensor, metadata: AttentionMetadata, alone: torch.Tensor
    ) -> list[AttentionPlan]:
        """Return one for each window, and last, if there are any, that of the rows which are `alone`."""

        def plan(batch: AttentionMetadata, window: int | None) -> AttentionPlan:
            scale, softcap = self._shape.attention_scale, self._shape.softcap
            return attention_plan(self._library, query, pool_layer, batch, scale, window, softcap)

        plans = [plan(metadata, window) for window in self._windows]
        if len(alone):
            plans.append(plan(each_alone(metadata, alone), self._windows[self._layers[-1].attention]))
        return plans

    def _scratch(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return qkv [T, heads + 2 * kv_heads, head_dim], wide and gated [T, ...], in memory that is kept.

        Fresh memory of this size comes as pages that the kernel clears first: 7 % of a long prefill.
        """
        shape, tokens = self._shape, hidden.shape[0]
        all_heads = shape.heads + 2 * shape.kv_heads
        sizes = [tokens * width for width in (all_heads * shape.head_dim, self._wide, self._gated)]
        if self._memory.dtype != hidden.dtype or self._memory.numel() < sum(sizes):
            self._memory = hidden.new_empty(sum(sizes))
        qkv, wide, gated = self._memory[: sum(sizes)].split(sizes)
        return qkv.view(tokens, all_heads, shape.head_dim), wide, gated


def can_fuse(layers: Sequence[LayerParts], shape: LayersShape) -> bool:
    """Tell whether the C++ knows everything of these layers."""
    projections = [p for layer in layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    norms = [norm for layer in layers for norm in _norms(layer) if norm is not None]
    return (
        bool(layers)
        and all(isinstance(projection.layer, NativeLinear) for projection in projections)
        and len({norm.dtype for norm in norms}) == 1
        and norms[0].dtype in STORED
        and shape.attention_scale > 0
        and shape.head_dim % 8 == 0
        and shape.head_dim <= 256
    )


def _few(rows: torch.Tensor, tokens: int) -> bool:
    """Whether the last layer is worth computing for these rows alone, each with an attention of its own."""
    if LEAST_TOKENS_PER_ROW * len(rows) > tokens:
        return False
    # They move to the front in place, so they must be in order; and nobody else looks whether they are there.
    return all(0 <= low < high for low, high in pairwise([*rows.tolist(), tokens]))


def _norms(layer: LayerParts) -> tuple[torch.Tensor | None, ...]:
    return (
        layer.query_norm,
        layer.key_norm,
        layer.post_attention_norm,
        layer.mlp_norm,
        layer.post_mlp_norm,
        layer.next_norm,
    )


def _layer_call(layer: LayerParts, attention: int) -> DecoderLayerCall:
    norms = [None if norm is None else norm.data_ptr() for norm in _norms(layer)]
    linears = [_linear_call(part) for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return DecoderLayerCall(*linears, *norms, layer.rope, attention)


def _linear_call(projection: Projection) -> LinearCall:
    layer, bias = projection.layer, projection.bias
    assert isinstance(layer, NativeLinear)  # can_fuse saw to it
    return LinearCall(
        layer.pointer, None if bias is None else bias.data_ptr(), layer.halves, layer.inputs, layer.outputs
    )
