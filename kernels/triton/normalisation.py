"""RMS normalisation, alone or after the residual addition: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_HIDDEN = 16384
"""A row is held in registers, and wider ones spill."""


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    total_ptr: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    WIDE_WEIGHT: tl.constexpr,
) -> None:
    """Normalise x[outer, inner], or x + residual, which is then stored too. Grid: (outer, inner).

    Everything but x is contiguous; with ADDS, x is too.
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    source = tl.program_id(0).to(tl.int64) * outer_stride + tl.program_id(1) * inner_stride
    x = tl.load(x_ptr + source + lane, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + row * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * HIDDEN + lane, total, mask=inside)
        x = total.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if not WIDE_WEIGHT:
        scaled = scaled.to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + row * HIDDEN + lane, (scaled * weight).to(output_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels/rms_norm.py; hidden is at most MOST_HIDDEN. Heads of a wider tensor are read in place."""
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.contiguous().view(-1, 1, x.shape[-1])
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, eps, output, None)
    return output


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels/rms_norm.py; hidden is at most MOST_HIDDEN."""
    rows = x.contiguous()
    output, total = torch.empty_like(rows), torch.empty_like(rows)
    _launch(rows.view(-1, 1, x.shape[-1]), residual.contiguous(), weight, eps, output, total)
    return output, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    output: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    outer, inner, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if not x.numel():
        return
    rms_norm_kernel[(outer, inner)](
        x,
        residual if residual is not None else x,
        weight.contiguous(),
        output,
        total if total is not None else output,
        x.stride(0),
        x.stride(1),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADDS=residual is not None,
        WIDE_WEIGHT=weight.dtype == torch.float32,
        num_warps=min(8, max(1, block // 512)),
    )
