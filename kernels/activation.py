"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    gate_up: [..., 2 * intermediate], gate first. Returns [..., intermediate].
    Raises ValueError for an odd last dimension.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: needs an even last dimension, is {tuple(gate_up.shape)}")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
