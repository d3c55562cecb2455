"""What the C++ attention is told of a step, worked out for the first layer that asks."""

from __future__ import annotations

import ctypes
import weakref

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.kernels.native.library import DTYPES, AttentionCall, AttentionOfStep


class AttentionPlan:
    """A call that only lacks its tensors, how its work is cut, and the scratch memory for it."""

    def __init__(self, library: ctypes.CDLL, call: AttentionCall, metadata: AttentionMetadata) -> None:
        """Take a call whose fields are all set; the metadata's tensors must outlive the plan."""
        self._attention = library.kvhive_attention
        self._call = call
        self._reference = ctypes.byref(call)
        self._metadata_tensors = (metadata.block_tables, metadata.query_starts, metadata.context_lengths)
        self._work: int = library.kvhive_attention_divide(self._reference)
        weakref.finalize(self, library.kvhive_attention_forget, self._work)
        floats: int = library.kvhive_attention_scratch(self._reference, self._work)
        self._scratch = torch.empty(floats)
        self._scratch_pointer = self._scratch.data_ptr()

    def of_step(self) -> AttentionOfStep:
        """Return it for a call that knows its tensors; the plan must outlive that."""
        return AttentionOfStep(ctypes.addressof(self._call), self._work, self._scratch_pointer)

    def run(self, query: torch.Tensor, pool_layer: torch.Tensor) -> torch.Tensor:
        """Return the attention of each query: [T, heads, head_dim], dense."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attention(
            self._reference,
            self._work,
            query.data_ptr(),
            pool_layer.data_ptr(),
            output.data_ptr(),
            self._scratch_pointer,
        )
        return output


def attention_plan(
    library: ctypes.CDLL,
    query: torch.Tensor,
    pool_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> AttentionPlan:
    """Return the plan for calls of this kind; arguments are paged_attention's."""
    _, heads, head_dim = query.shape
    block_stride, query_stride = pool_layer.stride(0), query.stride(0)
    kv_heads, threads = pool_layer.shape[2], torch.get_num_threads()
    shape = (heads, kv_heads, head_dim, query_stride, block_stride, query.dtype)
    kind = ("native", *shape, scale, window, softcap, threads)
    plan: AttentionPlan | None = metadata.plans.get(kind)
    if plan is None:
        call = AttentionCall(
            block_tables=metadata.block_tables.data_ptr(),
            query_starts=metadata.query_starts.data_ptr(),
            context_lengths=metadata.context_lengths.data_ptr(),
            sequences=metadata.block_tables.shape[0],
            table_width=metadata.block_tables.shape[1],
            block_size=metadata.block_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query_stride=query_stride,
            block_stride=block_stride,
            window=window or 0,
            dtype=DTYPES[query.dtype],
            threads=threads,
            scale=scale,
            softcap=softcap or 0.0,
        )
        plan = metadata.plans[kind] = AttentionPlan(library, call, metadata)
    return plan
