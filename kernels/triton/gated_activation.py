"""The gated activations, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def gated_activation_kernel(
    gate_up_ptr: tl.tensor,
    output_ptr: tl.tensor,
    row_stride: tl.tensor,
    half: tl.tensor,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """Write activation(gate) * up of a part of one row. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < half
    gate = tl.load(gate_up_ptr + row * row_stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + half + lane, mask=inside, other=0.0).to(tl.float32)
    # 0.5 * (1 + tanh(z)) is sigmoid(2 * z), so that both are gate * sigmoid(something).
    inner = gate * (1.5957691216057308 + 0.07135481282698037 * gate * gate) if GELU else gate
    activated = gate / (1.0 + tl.exp(-inner))
    # Rounded before the product, as the reference rounds.
    activated = activated.to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + row * half + lane, (activated * up).to(output_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """Return silu(gate) * up, or with gelu its tanh approximation; see kernels/activation.py."""
    half = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * half)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    output = torch.empty(*gate_up.shape[:-1], half, dtype=gate_up.dtype, device=gate_up.device)
    if output.numel():
        gated_activation_kernel[(rows.shape[0], triton.cdiv(half, _BLOCK))](
            rows, output, rows.stride(0), half, BLOCK=_BLOCK, GELU=gelu, num_warps=4
        )
    return output
