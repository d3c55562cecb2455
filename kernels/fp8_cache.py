"""Keys and values in eight bits: the format of a pool that takes half the memory.

float8 e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): a sign, four bits of exponent, three
of mantissa; magnitudes from 2 ** -9 to 448. There are no scales beside it: numbers of four significant bits
are as exact whatever power of two they are multiplied by, so a scale could only help what is below 2 ** -6,
which hardly counts in a dot product, or above 448, which becomes 448. And without scales a block is what it
was: one contiguous chunk, whose content depends on its own tokens alone.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def holds(pool_layer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether keys and values of this dtype may be written into such a pool."""
    return pool_layer.dtype in (dtype, FP8)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of eight bits, ties to even; what is too large becomes the largest."""
    return x.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
