"""Allocate a worker's KV pool, once."""

from __future__ import annotations

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.model_runner import ModelShape


def allocate_pool(
    shape: ModelShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return zeros `[blocks, layers, 2, kv_heads, block_size, head_dim]`; K is plane 0, V plane 1.

    A block of all layers is one contiguous chunk of shape.block_bytes(block_size) bytes.
    Raises ValueError for sizes below 1 or a dtype that is not the shape's, ModelError (with the bytes it
    asked for) when the device has no room.
    """
    if blocks < 1 or block_size < 1:
        raise ValueError(f"blocks, block_size: must be at least 1, are {blocks} and {block_size}")
    if dtype.itemsize != shape.bytes_per_element:
        raise ValueError(f"dtype: {dtype} is not of {shape.bytes_per_element} bytes")
    nbytes = blocks * shape.block_bytes(block_size)
    try:
        return torch.zeros(
            (blocks, shape.layers, 2, shape.kv_heads, block_size, shape.head_dim), dtype=dtype, device=device
        )
    except RuntimeError as error:  # torch's only error for "no memory" on the CPU; CUDA's is a subclass
        raise ModelError(
            f"the KV pool of {blocks} blocks of {block_size} tokens needs {nbytes} bytes "
            f"({nbytes / 2**30:.1f} GiB), which {device} cannot give; lower workers.pool_tokens"
        ) from error
