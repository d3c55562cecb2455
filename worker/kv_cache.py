"""What a worker's KV pool is to be, and its allocation, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvhive.kernels.fp8_cache import FP8
from kvhive.proto.errors import ModelError
from kvhive.worker.model_runner import ModelShape

_FP8_CAPABILITY = (8, 9)
"""The first CUDA devices with instructions from and to numbers of eight bits."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Size and format of a pool."""

    blocks: int
    """0: as many as a CUDA device has room for."""
    block_size: int = 16
    dtype: str = "auto"
    """`auto` is the model's, `fp8` has eight bits (kernels/fp8_cache.py)."""

    def torch_dtype(self, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return what the pool's numbers are. Raises ModelError on a device that has no eight bits."""
        if self.dtype == "auto":
            return model_dtype
        if self.dtype != "fp8":
            raise ValueError(f"kv_dtype: must be auto or fp8, is {self.dtype!r}")
        if device.type == "cuda" and (own := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
            raise ModelError(
                f"workers.kv_dtype: fp8 needs a CUDA device of compute capability 8.9 or more, {device} "
                f"({torch.cuda.get_device_name(device)}) has {own[0]}.{own[1]}"
            )
        return FP8


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
