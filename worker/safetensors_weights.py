"""Read weights from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvhive.proto.errors import ModelError
from kvhive.worker.tensor_manifest import safetensors_entries, safetensors_files


def iterate_safetensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the single file or of all shards. Raises ModelError."""
    for file in safetensors_files(directory):
        # Our own look at the header names the damaged tensor; the library's error does not.
        names = [entry.name for entry in safetensors_entries(file)]
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
