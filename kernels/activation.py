"""The gated activations of the feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    gate_up: [..., 2 * intermediate], gate first. Returns [..., intermediate].
    Raises ValueError for an odd last dimension.
    """
    gate, up = _halves(gate_up)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, with the tanh approximation of gelu that Gemma was trained with.

    Shapes and errors are silu_and_mul's.
    """
    gate, up = _halves(gate_up)
    return F.gelu(gate, approximate="tanh") * up


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: needs an even last dimension, is {tuple(gate_up.shape)}")
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up
