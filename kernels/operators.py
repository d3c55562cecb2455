"""Who computes: plain torch anywhere, C++ on the CPU, Triton on CUDA devices.

The public operators (one per file of this folder) check their arguments and call one of these. A set that
lacks an operator, or a dtype or shape of it, leaves it to the reference, which has everything.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.decoder_layers import FusedLayers, LayerParts, LayersShape
from kvhive.kernels.fp8_cache import FP8
from kvhive.kernels.packed_linear import PackedLinear
from kvhive.kernels.philox import NoiseStream

BACKEND_VARIABLE = "KVHIVE_KERNELS"
"""Environment: `auto` (default), `reference`, `native` or `triton`; to compare them and to find a fault."""

_BACKENDS = ("auto", "reference", "native", "triton")


class Operators(Protocol):
    """One implementation of everything. Shapes are those of the public operators, and are checked there."""

    name: str

    def pack_linear(self, weight: torch.Tensor) -> PackedLinear | None:
        """Return a layer with this weight [out, in] laid out anew; None where that would be no faster."""
        ...

    def fuse_layers(self, layers: Sequence[LayerParts], shape: LayersShape) -> FusedLayers | None:
        """Return all layers as one operator; None where that is not known or would be no faster."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See linear.py."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See rms_norm.py."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rms_norm.py."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        ...

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        ...

    def rotary_embedding(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See rotary_embedding.py."""
        ...

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See reshape_and_cache.py."""
        ...

    def rotary_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool_layer: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See rotary_and_cache.py."""
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        pool_layer: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See paged_attention.py."""
        ...

    def records_attention(self, pool_layer: torch.Tensor) -> bool:
        """Whether a CUDA graph of paged_attention over such a pool is right for any lengths."""
        ...

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """See block_copy.py."""
        ...

    def scatter_blocks(self, staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
        """See block_copy.py."""
        ...

    def copy_blocks(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See block_copy.py."""
        ...

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit and its lowest index: [rows], and [rows] int64.

        A row with NaN has NaN for its largest. logits: [rows, vocab_size].
        """
        ...

    def gumbel_argmax(self, scores: torch.Tensor, streams: Sequence[NoiseStream]) -> torch.Tensor:
        """Return argmax(scores + gumbel_noise) of each row: [rows] int64, ties to the lowest.

        scores: [rows, vocab_size] float32 or float64, -Inf where a token is not kept; may be overwritten.
        """
        ...


def operators_for(tensor: torch.Tensor) -> Operators:
    """Return who computes on this tensor's device."""
    return operators_on(tensor.device.type)


def operators_over(pool_layer: torch.Tensor) -> Operators:
    """Return who reads and writes this pool: the reference where a CPU has one of eight bits."""
    found = operators_for(pool_layer)
    if pool_layer.dtype == FP8 and found.name == "native":
        return _reference()
    return found


def _reference() -> Operators:
    from kvhive.kernels.reference.operators import ReferenceOperators

    return ReferenceOperators()


@functools.cache
def operators_on(device: str) -> Operators:
    """Choose once per kind of device, by the environment as it is then.

    Raises ValueError for an unknown backend, RuntimeError for an absent one.
    """
    wanted = os.environ.get(BACKEND_VARIABLE, "auto")
    if wanted not in _BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE}: needs one of {', '.join(_BACKENDS)}, is {wanted!r}")
    # Imported where they are used: neither a compiler nor Triton is asked for on a device that needs none.
    if wanted == "native" or (wanted == "auto" and device == "cpu"):
        if device != "cpu":
            raise RuntimeError(f"{BACKEND_VARIABLE}: native kernels are for the CPU, not for {device}")
        from kvhive.kernels.native.operators import native_operators

        if found := native_operators(required=wanted == "native"):
            return found
    if wanted == "triton" or (wanted == "auto" and device == "cuda"):
        try:
            from kvhive.kernels.triton.operators import TritonOperators
        except ImportError as error:
            raise RuntimeError(f"Triton kernels: {error}") from error
        return TritonOperators()
    return _reference()
