"""The operators in C++ for the CPU, where a compiler was found.

Each method looks whether the C++ knows the case (float32 or bfloat16, dense rows, the CPU), and leaves the
others to the reference.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.decoder_layers import LayerParts, LayersShape
from kvhive.kernels.native.attention_plan import attention_plan
from kvhive.kernels.native.decoder_layers import NativeLayers, can_fuse
from kvhive.kernels.native.library import DTYPES, STORED, Stream, load_library
from kvhive.kernels.native.linear import NativeLinear
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.reference.operators import ReferenceOperators
from kvhive.toolchain.build_cache import cached_library
from kvhive.toolchain.compiler import BuildError, Compiler, sources_in

log = logging.getLogger(__name__)

_MOST_HEAD_DIM = 256
_SCORES = (torch.float32, torch.float64)


class NativeOperators(ReferenceOperators):
    """Implements Operators. Uses as many threads as torch does, and fewer for little work."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take what load_library returned."""
        self.library = library

    def pack_linear(self, weight: torch.Tensor) -> NativeLinear | None:
        """See Operators."""
        fits = weight.dtype in STORED and weight.is_contiguous() and weight.numel()
        return NativeLinear(self.library, weight) if fits else None

    def fuse_layers(self, layers: Sequence[LayerParts], shape: LayersShape) -> NativeLayers | None:
        """See Operators."""
        return NativeLayers(self.library, layers, shape) if can_fuse(layers, shape) else None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See rms_norm.py."""
        dimensions, strides = x.dim(), x.stride()
        fits = dimensions in (2, 3) and strides[-1] == 1 and x.numel() and _weight_fits(x, weight)
        if not fits:
            return super().rms_norm(x, weight, eps)
        rows = x.numel() // x.shape[-1]
        inner, inner_stride = (x.shape[1], strides[1]) if dimensions == 3 else (1, 0)
        return self._norm(x, None, weight, eps, (rows, inner, strides[0], inner_stride))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rms_norm.py. The residual becomes the sum, in place."""
        fits = x.is_contiguous() and residual.is_contiguous() and residual.dtype == x.dtype
        if not (fits and x.numel() and _weight_fits(x, weight)):
            return super().add_rms_norm(x, residual, weight, eps)
        hidden = x.shape[-1]
        return self._norm(x, residual, weight, eps, (x.numel() // hidden, 1, hidden, 0)), residual

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        rows: tuple[int, int, int, int],
    ) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.library.kvhive_rms_norm(
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *rows,
            x.shape[-1],
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        if gate_up.dtype not in STORED or not gate_up.is_contiguous() or not gate_up.numel():
            return super().silu_and_mul(gate_up)
        return self._gated(self.library.kvhive_silu_and_mul, gate_up)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See activation.py."""
        if gate_up.dtype not in STORED or not gate_up.is_contiguous() or not gate_up.numel():
            return super().gelu_tanh_and_mul(gate_up)
        return self._gated(self.library.kvhive_gelu_tanh_and_mul, gate_up)

    def _gated(self, function: ctypes._NamedFuncPointer, gate_up: torch.Tensor) -> torch.Tensor:
        *leading, both = gate_up.shape
        out = gate_up.new_empty(*leading, both // 2)
        function(
            DTYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            gate_up.numel() // both,
            both // 2,
            torch.get_num_threads(),
        )
        return out

    def rotary_embedding(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See rotary_embedding.py."""
        if x.dtype not in STORED or not _dense_heads(x) or not _angles_fit(cos, sin):
            return super().rotary_embedding(x, cos, sin)
        tokens, heads, head_dim = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.library.kvhive_rotary(
            DTYPES[x.dtype],
            x.data_ptr(),
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            head_dim,
            x.stride(0),
            torch.get_num_threads(),
        )
        return out

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, pool_layer: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See reshape_and_cache.py. Raises IndexError for a slot outside the pool, as torch does."""
        fits = _dense_heads(key) and _dense_heads(value) and _is_pool_layer(pool_layer)
        if key.dtype not in STORED or not fits or not slot_mapping.is_contiguous():
            return super().reshape_and_cache(key, value, pool_layer, slot_mapping)
        blocks, _, kv_heads, block_size, head_dim = pool_layer.shape
        outside = self.library.kvhive_reshape_and_cache(
            DTYPES[key.dtype],
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            pool_layer.data_ptr(),
            blocks,
            pool_layer.stride(0),
            kv_heads,
            block_size,
            slot_mapping.data_ptr(),
            slot_mapping.shape[0],
            head_dim,
            torch.get_num_threads(),
        )
        if outside:
            raise IndexError(f"slot_mapping: a slot is outside the pool of {blocks * block_size}")

    def rotary_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool_layer: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See rotary_and_cache.py. Turns queries in place. Raises IndexError as reshape_and_cache does."""
        fits = qkv.dtype in STORED and qkv.is_contiguous() and _is_pool_layer(pool_layer)
        if not (fits and _angles_fit(cos, sin) and slot_mapping.is_contiguous()):
            return super().rotary_and_cache(qkv, cos, sin, pool_layer, slot_mapping)
        blocks, _, kv_heads, block_size, head_dim = pool_layer.shape
        tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
        outside = self.library.kvhive_rotary_and_cache(
            DTYPES[qkv.dtype],
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            pool_layer.data_ptr(),
            blocks,
            pool_layer.stride(0),
            kv_heads,
            block_size,
            slot_mapping.data_ptr(),
            tokens,
            heads,
            head_dim,
            torch.get_num_threads(),
        )
        if outside:
            raise IndexError(f"slot_mapping: a slot is outside the pool of {blocks * block_size}")
        return qkv[:, :heads]

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
        tokens, _, head_dim = query.shape
        fits = query.dtype in STORED and query.dtype == pool_layer.dtype and _dense_heads(query)
        if not (fits and tokens and scale > 0) or head_dim % 8 or head_dim > _MOST_HEAD_DIM:
            return super().paged_attention(query, pool_layer, metadata, scale, window, softcap)
        plan = attention_plan(self.library, query, pool_layer, metadata, scale, window, softcap)
        return plan.run(query, pool_layer)

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """See block_copy.py. Raises IndexError for a block outside the pool; so do the next two.

        By the calling thread alone, as the next one: the team is the engine's, and busy with its step.
        """
        self._copy(pool, blocks, out, None, 1)

    def scatter_blocks(self, staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
        """See block_copy.py."""
        self._copy(staging, None, pool, blocks, 1)

    def copy_blocks(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See block_copy.py."""
        self._copy(pool, sources, pool, targets, torch.get_num_threads())

    def _copy(
        self,
        from_: torch.Tensor,
        sources: torch.Tensor | None,
        to: torch.Tensor,
        targets: torch.Tensor | None,
        threads: int,
    ) -> None:
        sources = None if sources is None else sources.contiguous()
        targets = None if targets is None else targets.contiguous()
        count = min(ids.shape[0] for ids in (sources, targets) if ids is not None)
        outside = self.library.kvhive_copy_blocks(
            from_.data_ptr(),
            None if sources is None else sources.data_ptr(),
            from_.shape[0],
            to.data_ptr(),
            None if targets is None else targets.data_ptr(),
            to.shape[0],
            count,
            to[0].numel() * to.itemsize if count else 0,
            threads,
        )
        if outside:
            raise IndexError("blocks: one is outside the pool")

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Operators."""
        if logits.dtype not in STORED or not logits.is_contiguous() or not logits.numel():
            return super().greedy(logits)
        rows, vocab_size = logits.shape
        largest, tokens = logits.new_empty(rows), torch.empty(rows, dtype=torch.int64)
        self.library.kvhive_greedy(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            largest.data_ptr(),
            tokens.data_ptr(),
            rows,
            vocab_size,
            torch.get_num_threads(),
        )
        return largest, tokens

    def gumbel_argmax(self, scores: torch.Tensor, streams: Sequence[NoiseStream]) -> torch.Tensor:
        """See Operators."""
        fits = scores.dtype in _SCORES and scores.is_contiguous() and scores.numel()
        if not fits or not all(map(_stream_fits, streams)):
            return super().gumbel_argmax(scores, streams)
        rows, vocab_size = scores.shape
        # ctypes keeps the lowest 32 bits of each.
        parts = (Stream * rows)(*((seed, seed >> 32, choice, position) for seed, choice, position in streams))
        tokens = torch.empty(rows, dtype=torch.int64)
        size: int = self.library.kvhive_gumbel_scratch(rows, vocab_size)
        scratch = torch.empty(size, dtype=torch.uint8)
        self.library.kvhive_gumbel_argmax(
            DTYPES[scores.dtype],
            scores.data_ptr(),
            ctypes.addressof(parts),
            tokens.data_ptr(),
            scratch.data_ptr(),
            rows,
            vocab_size,
            torch.get_num_threads(),
        )
        return tokens


def native_operators(required: bool) -> NativeOperators | None:
    """Return them, having built the library if this is its first use.

    None, and one line in the log, on a machine where they cannot be had; RuntimeError if they are required.
    """
    try:
        compiler, sources = Compiler.found(), sources_in(Path(__file__).parent)
        with cached_library(
            "native", compiler.fingerprint(sources), lambda path: compiler.build(sources, path)
        ) as path:
            return NativeOperators(load_library(path))
    except (BuildError, OSError) as error:
        if required:
            raise RuntimeError(f"native kernels: {error}") from error
        log.warning("native kernels unavailable, plain torch computes instead reason=%s", error)
        return None


def _weight_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    known = x.dtype in STORED and weight.dtype in (torch.float32, x.dtype)
    return known and bool(weight.is_contiguous())


def _dense_heads(x: torch.Tensor) -> bool:
    """Tell whether all but the first dimension of [T, heads, head_dim] is dense."""
    return bool(x.stride()[1:] == (x.shape[2], 1))


def _angles_fit(cos: torch.Tensor, sin: torch.Tensor) -> bool:
    known = cos.dtype == torch.float32 and sin.dtype == torch.float32
    return known and bool(cos.is_contiguous() and sin.is_contiguous())


def _is_pool_layer(pool_layer: torch.Tensor) -> bool:
    _, _, kv_heads, block_size, head_dim = pool_layer.shape
    width = block_size * head_dim
    return bool(pool_layer.stride()[1:] == (kv_heads * width, width, head_dim, 1))


def _stream_fits(stream: NoiseStream) -> bool:
    seed, choice, position = stream
    return 0 <= seed < 1 << 64 and 0 <= choice < 1 << 32 and 0 <= position < 1 << 32
