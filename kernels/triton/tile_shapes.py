"""How large the tiles of the attention kernels are: by head dimension and element size alone.

Not by batch, device or length, because the order of a row's sums follows from them. The compile gate
(scripts/compile_gate.py) says what each costs in registers and shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT_TOKENS = 256
"""Tokens of context that one program of the decode kernel reads. Fixed, so that a row's sums do not depend on
its batch mates; 1/32 of a program's traffic is then its partial result (4 heads of a group, 16-bit KV)."""

DECODE_ROWS = 16
"""Rows (queries times heads of a group) of the decode kernel: what a tensor core takes at least."""


class TileShape(NamedTuple):
    """One launch configuration of an attention kernel."""

    rows: int
    """Queries times heads of a group."""
    keys: int
    """Tokens of context at a time; divides SPLIT_TOKENS."""
    warps: int
    stages: int


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least a tensor core's 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_tile(head_dim: int, element_size: int) -> TileShape:
    """Return the decode kernel's shape. head_dim: padded; element_size: bytes of the pool's dtype."""
    if element_size == 4:
        # Without tensor cores: exact float32 products hold whole rows of K in registers.
        return TileShape(DECODE_ROWS, 16 if head_dim > 128 else 32, 4, 2)
    return TileShape(DECODE_ROWS, 32 if head_dim > 128 else 64, 4, 3)


def prefill_tile(head_dim: int, element_size: int) -> TileShape:
    """Return the prefill kernel's shape. head_dim: padded; element_size: bytes of the pool's dtype."""
    if element_size == 4:
        return TileShape(16 if head_dim > 128 else 32, 16 if head_dim > 128 else 32, 4, 2)
    if head_dim > 128:
        return TileShape(128, 32, 8, 2)
    # Two warp groups of 64 rows: with four warps, 128 rows spill registers.
    return TileShape(128, 64, 8, 3)
