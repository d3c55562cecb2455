"""Iterate over a model's weights under their Hugging Face names, whatever file they are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.gguf_weights import iterate_gguf
from kvhive.worker.safetensors_weights import iterate_safetensors


def iterate_weights(path: Path, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on the CPU) one at a time, so that memory holds one tensor beside the model.

    GGUF tensors come dequantized to float32, safetensors in their own dtype. A yielded tensor may be a view
    of a file: copy it, do not write to it. Raises ModelError that names the file and the tensor.
    """
    if path.is_dir():
        return iterate_safetensors(path)
    return iterate_gguf(path, config)
