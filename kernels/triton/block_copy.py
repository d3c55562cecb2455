"""Whole blocks from place to place: one program per part of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PART = 4096
"""Elements that one program copies: with 16-bit elements four of 16 bytes for each of 128 threads."""


@triton.jit
def block_copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_blocks_ptr: tl.tensor,
    target_blocks_ptr: tl.tensor,
    width: tl.tensor,
    PART: tl.constexpr,
    FROM_LISTED: tl.constexpr,
    TO_LISTED: tl.constexpr,
) -> None:
    """Copy a part of block i; where a side is not listed, i itself is the block. Grid: (blocks, parts)."""
    index = tl.program_id(0)
    source = tl.load(source_blocks_ptr + index) if FROM_LISTED else index.to(tl.int64)
    target = tl.load(target_blocks_ptr + index) if TO_LISTED else index.to(tl.int64)
    lane = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = lane < width
    data = tl.load(source_ptr + source * width + lane, mask=inside)
    tl.store(target_ptr + target * width + lane, data, mask=inside)


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor | None,
    target_blocks: torch.Tensor | None,
) -> None:
    """target[target_blocks[i]] = source[source_blocks[i]]; None stands for blocks 0, 1, 2 ...

    source, target: [blocks, ...], contiguous, of one dtype and block shape; at least one side is listed.
    """
    listed = source_blocks if source_blocks is not None else target_blocks
    assert listed is not None
    width = source[0].numel() if source.shape[0] else 0
    if not listed.shape[0] or not width:
        return
    block_copy_kernel[(listed.shape[0], triton.cdiv(width, _PART))](
        source,
        target,
        (listed if source_blocks is None else source_blocks).contiguous(),
        (listed if target_blocks is None else target_blocks).contiguous(),
        width,
        PART=_PART,
        FROM_LISTED=source_blocks is not None,
        TO_LISTED=target_blocks is not None,
        num_warps=4,
    )
