"""`scripts/gpu_check --dry` runs the whole check on the CPU, with nothing of a cluster installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "ray",
    "redis",
    "grpc",
    "google",
    "safetensors",
    "gguf",
    "transformers",
    "tokenizers",
    "yaml",
    "click",
)


def test_a_dry_run_needs_torch_and_numpy_alone_and_finds_every_kernel_right(tmp_path: Path) -> None:
    for name in ABSENT:  # found first, and broken: as good as not installed
        (tmp_path / "absent" / name).mkdir(parents=True)
        (tmp_path / "absent" / name / "__init__.py").write_text(f"raise ImportError('{name} is absent')\n")
    report = tmp_path / "report.json"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "absent")}
    result = subprocess.run(
        [ROOT / "scripts/gpu_check", "--dry", "--json", report],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(report.read_text())
    assert len(written["kernels"]) > 40 and all(row["right"] for row in written["kernels"])
    assert len(written["transfer"]) == 3 and all(row["right"] for row in written["transfer"])
    (engine,) = written["engine"]
    assert engine["right"] and engine["agreed"] == engine["tokens"] and engine["difference"] < 1e-4
    assert written["dry"] and written["decode"] and written["prefill"] and written["overhead"]
    assert written["first_token"]["warm_ms"] > 0


def test_without_a_gpu_it_says_so_at_once() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [ROOT / "scripts/gpu_check"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and "there is no CUDA device here; --dry" in result.stderr
