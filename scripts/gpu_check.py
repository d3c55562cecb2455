"""Is it right, and how near to the limit? Kernels and engine on this machine's device: a table and a JSON."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvhive.scripts.gpu_engine import (
    check_engine,
    make_runner,
    step_overhead,
    time_decode,
    time_prefill,
    time_to_first_token,
)
from kvhive.scripts.gpu_kernels import check_kernels, time_kernels
from kvhive.scripts.gpu_limits import measure_limits
from kvhive.scripts.gpu_transfer import check_transfer


def main() -> None:
    """Run the check and exit: 0 when every kernel and the engine are right."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, in miniature")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --dry runs on the CPU")
    device = torch.device("cpu" if arguments.dry else "cuda:0")
    torch.manual_seed(int(time.time()))
    report = run(device, arguments.dry)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        row["case"]
        for row in (*report["kernels"], *report["transfer"], *report["engine"])
        if not row["right"]
    ]
    for case in wrong:
        print(f"WRONG: {case}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def run(device: torch.device, dry: bool) -> dict[str, Any]:
    """Do all of it, printing each table as it is done."""
    began = time.monotonic()
    report: dict[str, Any] = {"versions": versions(device), "dry": dry}
    print(json.dumps(report["versions"]))

    def section(name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        report[name] = work()
        print(f"\n{name} ({time.monotonic() - started:.1f} s)")
        for row in report[name] if isinstance(report[name], list) else [report[name]]:
            print("  " + "  ".join(f"{key} {shown(value)}" for key, value in row.items()))
        return report[name]

    limits = measure_limits(device, dry)
    rates = {"copy_gb_s": limits.copy_bytes_s / 1e9, "tflop_s": limits.matrix_flop_s / 1e12}
    section("limits", lambda: rates)
    with torch.inference_mode():
        section("kernels", lambda: check_kernels(device, dry))
        section("kernel_times", lambda: time_kernels(device, limits, dry))
    section("transfer", lambda: check_transfer(device, dry))
    runner = make_runner(device, dry)
    section("pool", lambda: {"blocks": runner.num_blocks, "tokens": runner.num_blocks * 16})
    section("engine", lambda: [check_engine(runner, dry)])
    section("decode", lambda: time_decode(runner, limits, dry))
    section("prefill", lambda: time_prefill(runner, dry))
    section("first_token", lambda: time_to_first_token(runner, dry))
    section("overhead", lambda: step_overhead(runner))
    report["seconds"] = time.monotonic() - began
    return report


def versions(device: torch.device) -> dict[str, str]:
    """Return what the figures depend on."""
    try:
        import triton

        installed = str(triton.__version__)
    except ImportError:
        installed = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "torch": torch.__version__,
        "triton": installed,
        "python": platform.python_version(),
    }


def shown(value: object) -> str:
    """Return a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
