"""How large the tiles of the attention kernels are: by head dimension, element size and kind of device.

Not by batch or length, because the order of a row's sums follows from them. The compile gate
(scripts/compile_gate.py) says what each costs in registers and shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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


def compute_capability(device: torch.device) -> int:
    """Return 90 for sm_90, and so on; also for the CPU, where these kernels are only interpreted."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


def decode_tile(head_dim: int, element_size: int) -> TileShape:
    """Return the decode kernel's shape. head_dim: padded; element_size: bytes of the queries' dtype."""
    if element_size == 4:
        # Without tensor cores: exact float32 products hold whole rows in registers.
        return TileShape(DECODE_ROWS, 16, 4, 2)
    return TileShape(DECODE_ROWS, 32 if head_dim > 128 else 64, 4, 3)


def prefill_tile(head_dim: int, element_size: int, capability: int, eight_bits: bool) -> TileShape:
    """Return the prefill kernel's shape. head_dim: padded; element_size: bytes of the queries' dtype.

    eight_bits: of the pool: its keys and values pass through registers, to become what the queries are
    """
    if element_size == 4:
        return TileShape(16, 32 if head_dim <= 64 else 16, 4, 2)
    if head_dim < 64:
        return TileShape(64, 64, 4, 3)
    if head_dim == 64:
        return TileShape(128, 64, 8, 3)
    if eight_bits and head_dim > 128:
        return TileShape(64, 32, 8, 2)
    if capability >= 90:
        # Two warp groups of 64 rows, whose operands stay in shared memory.
        return TileShape(128, 64, 8, 3) if head_dim <= 128 else TileShape(128, 32, 8, 2)
    return TileShape(128, 32, 8, 3) if head_dim <= 128 else TileShape(64, 32, 8, 2)
