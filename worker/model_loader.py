"""Make a model of its files: the native decoder."""

from __future__ import annotations

from pathlib import Path

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.forward_batch import LanguageModel
from kvhive.worker.model_config import ModelConfig
from kvhive.worker.weights import iterate_weights


def load_model(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> LanguageModel:
    """Load the weights of the model that `config` was read of. Raises ModelError that names the files."""
    try:
        with torch.inference_mode():
            return DecoderModel(config, iterate_weights(path, config), dtype, device)
    except ModelError as error:
        # The model names the tensor; only here is the file known.
        where = str(path)
        raise error if where in str(error) else ModelError(f"{where}: {error}") from error
