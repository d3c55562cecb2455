"""The gated activations of the feed-forward layer."""

from __future__ import annotations

import torch

from kvhive.kernels.operators import operators_for


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    gate_up: [..., 2 * intermediate], gate first. Returns [..., intermediate].
    Raises ValueError for an odd last dimension.
    """
    _check(gate_up)
    return operators_for(gate_up).silu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, with the tanh approximation of gelu that Gemma was trained with.

    Shapes and errors are silu_and_mul's.
    """
    _check(gate_up)
    return operators_for(gate_up).gelu_tanh_and_mul(gate_up)


def _check(gate_up: torch.Tensor) -> None:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: needs an even last dimension, is {tuple(gate_up.shape)}")
