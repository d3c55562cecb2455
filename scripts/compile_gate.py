"""Compiles every Triton kernel for sm_80 and sm_90, without a GPU, and refuses what would be slow there.

The kernels' own launchers run on small CPU tensors; each launch is compiled as on a device, and not run. What
fails: spilled registers, a stack frame, more shared memory than the device has, and 16-bit prefill attention
or linear layers on sm_90 without their warp-group matrix instructions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvhive.kernels.fp8_cache import FP8

ARCHITECTURES = (80, 90)
_SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
"""Bytes that one program may have. Source: CUDA programming guide, technical specifications."""

_HEAD_DIMS = (64, 80, 128, 256)
"""One for each padded size that models have, and one that fills a part of it only, which costs a mask."""

_RARE_HEAD_DIMS = (16, 32, 96, 192)

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of launch."""

    name: str
    launch: Callable[[], Any]
    needs_wgmma: str = ""
    """The kernel, of those that are launched, that must multiply by warp groups on sm_90."""
    rare: bool = False
    """Compiled with --all only: differs from another case in a constant, or is not for production."""
    architectures: tuple[int, ...] = ARCHITECTURES
    """Where it can run: devices before 8.9 have no conversion from and to eight bits."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one compiled kernel takes."""

    kernel: str
    case: str
    architecture: int
    registers: int
    stack: int
    """Bytes of stack frame per thread; spilled registers go there."""
    local: int
    """Bytes of local memory per thread beside the stack."""
    shared: int
    """Bytes of shared memory per program."""
    wgmma: int
    """Warp-group matrix instructions in the PTX."""
    needs_wgmma: bool

    @property
    def fault(self) -> str:
        """What the gate refuses it for; empty when it passes."""
        faults = {
            "spills": self.stack or self.local,
            "too much shared memory": self.shared > _SHARED_LIMIT[self.architecture],
            "no wgmma": self.needs_wgmma and self.architecture == 90 and not self.wgmma,
        }
        return ", ".join(name for name, found in faults.items() if found)


def cases() -> Iterator[Case]:
    """Every launch there is, once per configuration that its kernels are compiled for."""
    yield from _attention_cases()
    yield from _layer_cases()
    yield from _sampling_cases()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all kernels; return 1 when one of them has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases to compile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--all", action="store_true", help="rare configurations too, which takes minutes")
    options = parser.parse_args(arguments)
    # The interpreter would take the place of the compiler.
    os.environ.pop("TRITON_INTERPRET", None)
    chosen = [case for case in cases() if options.only in case.name and (options.all or not case.rare)]
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(_compile_by_name, case.name, architecture)
            for case in chosen
            for architecture in case.architectures
        ]
        reports = [report for job in jobs for report in job.result()]
    print(_row("kernel", "case", "arch", "regs", "stack", "local", "shared", "wgmma", ""))
    for each in sorted(reports, key=lambda report: (report.kernel, report.case, report.architecture)):
        arch = f"sm_{each.architecture}"
        counts = (each.registers, each.stack, each.local, each.shared, each.wgmma)
        print(_row(each.kernel, each.case, arch, *counts, each.fault))
    faults = sum(bool(report.fault) for report in reports)
    print(f"{len(reports)} kernels compiled, {faults} with a fault")
    return 1 if faults else 0


def _row(kernel: str, case: str, *columns: object) -> str:
    *numbers, fault = columns
    return f"{kernel:24} {case:34}" + "".join(f"{number!s:>8}" for number in numbers) + f"  {fault}".rstrip()


def _compile_by_name(name: str, architecture: int) -> list[Report]:
    """Run in a process of its own: cases hold tensors and functions that are not worth sending."""
    (case,) = (case for case in cases() if case.name == name)
    compiled = _compiled(case.launch, architecture)
    launched = [kernel for kernel, _ in compiled]
    if case.needs_wgmma and case.needs_wgmma not in launched:
        raise ValueError(f"{name}: needs {case.needs_wgmma} to be launched, has {launched}")
    return [_report(case, kernel, binary, architecture) for kernel, binary in compiled]


class _NoDevice:
    """As much of a driver of Triton's as compiling asks for. Devices are numbered by architecture."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def _compiled(launch: Callable[[], Any], architecture: int) -> list[tuple[str, Any]]:
    """Return name and binary of every kernel that the function launches; none of them runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kvhive.kernels.triton import tile_shapes

    driver.set_active(_NoDevice(architecture))
    original, found = JITFunction.run, []

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        binary = original(self, *arguments, **{**options, "warmup": True})
        found.append((self.__name__, binary))
        return binary

    capability = mock.patch.object(tile_shapes, "compute_capability", return_value=architecture)
    with capability, mock.patch.object(JITFunction, "run", run):
        launch()
    return found


def _report(case: Case, kernel: str, binary: Any, architecture: int) -> Report:
    usage = _resource_usage(binary.asm["cubin"])
    wgmma = len(re.findall(r"wgmma\.mma_async", binary.asm["ptx"]))
    shared = binary.metadata.shared
    return Report(
        kernel,
        case.name,
        architecture,
        usage["REG"],
        usage["STACK"],
        usage["LOCAL"],
        shared,
        wgmma,
        case.needs_wgmma == kernel,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Ask the disassembler that Triton brings along."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown.stdout + shown.stderr)
    return {name: int(value) for name, value in found}


def _attention_cases() -> Iterator[Case]:
    kinds = itertools.product(
        (*_HEAD_DIMS, *_RARE_HEAD_DIMS), (torch.bfloat16, torch.float16, torch.float32), (None, 50.0)
    )
    for head_dim, dtype, softcap in kinds:
        kind = f"{head_dim} {str(dtype).removeprefix('torch.')}{' capped' if softcap else ''}"
        half = dtype != torch.float32
        rare = head_dim in _RARE_HEAD_DIMS
        rare |= dtype == torch.float16 or (softcap is not None and (not half or head_dim == 80))
        rare |= not half and head_dim == 80
        for queries, phase in ((1, "decode"), (64, "prefill")):
            wgmma = "prefill_kernel" if half and phase == "prefill" else ""
            launch = functools.partial(_attention, head_dim, dtype, softcap, queries, dtype)
            yield Case(f"{phase} {kind}", launch, wgmma, rare)
            if half:
                launch = functools.partial(_attention, head_dim, dtype, softcap, queries, FP8)
                yield Case(f"{phase} {kind} over fp8", launch, wgmma, rare, (90,))


def _attention(
    head_dim: int, dtype: torch.dtype, softcap: float | None, queries: int, pool_dtype: torch.dtype
) -> None:
    from kvhive.kernels.attention_metadata import attention_metadata

    pool = torch.zeros(8, 1, 2, 2, _BLOCK_SIZE, head_dim, dtype=pool_dtype)
    metadata = attention_metadata(pool, [list(range(8))], [queries], [100])
    query = torch.zeros(queries, 8, head_dim, dtype=dtype)
    _operators().paged_attention(query, pool[:, 0], metadata, head_dim**-0.5, None, softcap)


def _layer_cases() -> Iterator[Case]:
    for dtype, wgmma in ((torch.bfloat16, "linear_kernel"), (torch.float32, "")):
        for rows, inputs in ((8, 4096), (8, 576), (300, 4096)):
            name = f"linear {rows} x {inputs} {str(dtype).removeprefix('torch.')}"
            yield Case(name, functools.partial(_linear, rows, inputs, dtype), wgmma)
    for hidden in (576, 16384):
        yield Case(f"norm {hidden}", functools.partial(_norms, hidden))
    for head_dim in _HEAD_DIMS:
        yield Case(f"rotary {head_dim}", functools.partial(_rotary, head_dim, torch.bfloat16))
        yield Case(f"rotary {head_dim} fp8", functools.partial(_rotary, head_dim, FP8), architectures=(90,))
    yield Case("activation", _activations)
    yield Case("blocks", _blocks)


def _linear(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(rows, inputs, dtype=dtype), torch.zeros(384, inputs, dtype=dtype)
    _operators().linear(x, weight, weight[:, 0].contiguous())


def _norms(hidden: int) -> None:
    x, weight = torch.zeros(2, hidden, dtype=torch.bfloat16), torch.zeros(hidden, dtype=torch.bfloat16)
    operators = _operators()
    for each in (weight, weight.float()):
        operators.rms_norm(x, each, 1e-6)
        operators.add_rms_norm(x, x, each, 1e-6)


def _rotary(head_dim: int, pool_dtype: torch.dtype) -> None:
    pool = torch.zeros(2, 1, 2, 2, _BLOCK_SIZE, head_dim, dtype=pool_dtype)
    qkv, slots = torch.zeros(2, 8, head_dim, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    angles = torch.zeros(2, head_dim // 2)
    operators = _operators()
    operators.rotary_and_cache(qkv, angles, angles, pool[:, 0], slots)
    operators.rotary_embedding(qkv, angles, angles)
    operators.reshape_and_cache(qkv[:, :2], qkv[:, 2:4], pool[:, 0], slots)


def _activations() -> None:
    gate_up = torch.zeros(2, 3072, dtype=torch.bfloat16)
    _operators().silu_and_mul(gate_up)
    _operators().gelu_tanh_and_mul(gate_up)


def _blocks() -> None:
    pool = torch.zeros(4, 2, 2, 2, _BLOCK_SIZE, 64, dtype=torch.bfloat16)
    listed = torch.tensor([0, 1])
    operators = _operators()
    operators.gather_blocks(pool, listed, pool[:2].clone())
    operators.scatter_blocks(pool[:2].clone(), listed, pool)
    operators.copy_blocks(pool, listed, listed + 2)


def _sampling_cases() -> Iterator[Case]:
    yield Case("greedy", functools.partial(_greedy, torch.bfloat16))
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        yield Case(f"gumbel {name}", functools.partial(_gumbel, dtype))


def _greedy(dtype: torch.dtype) -> None:
    _operators().greedy(torch.zeros(2, 49152, dtype=dtype))


def _gumbel(dtype: torch.dtype) -> None:
    from kvhive.kernels.philox import NoiseStream

    _operators().gumbel_argmax(torch.zeros(2, 49152, dtype=dtype), [NoiseStream(0, 0, 0)] * 2)


def _operators() -> Any:
    """Imported late: Triton must not be there before main has chosen its compiler."""
    from kvhive.kernels.triton.operators import TritonOperators

    return TritonOperators()


if __name__ == "__main__":
    sys.exit(main())
