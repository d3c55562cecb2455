"""What a device can do at best: how fast it copies and multiplies, measured now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one device."""

    copy_bytes_s: float
    """Bytes read and written per second by a large copy."""
    matrix_flop_s: float
    """bfloat16 multiply-adds, counted as two, per second (float32 on a CPU)."""


def seconds(work: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Return the median seconds of `work` on the device, after three runs to warm up."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        return statistics.median(_timed(work) for _ in range(runs))
    times: list[float] = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def measure_limits(device: torch.device, dry: bool) -> Limits:
    """Copy and multiply, large enough that launches do not count."""
    nbytes, size = (1 << 22, 256) if dry else (1 << 32, 8192)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    multiply_s = seconds(lambda: a @ b, device)
    return Limits(2 * nbytes / copy_s, 2 * size**3 / multiply_s)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
