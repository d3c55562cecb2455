"""Numbers of the host on a device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of these numbers. To CUDA they go through pinned memory, so that nobody waits."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
