"""Read a model's configuration from its files. No torch here: the pool is sized without it."""

from __future__ import annotations

from pathlib import Path

from kvhive.worker.decoder_config import DTYPES, DecoderConfig
from kvhive.worker.decoder_config_gguf import config_from_gguf
from kvhive.worker.decoder_config_hf import config_from_directory

__all__ = ["DTYPES", "ModelConfig", "read_model_config", "resolve_dtype"]

ModelConfig = DecoderConfig
"""What is known of a model before its weights are loaded."""


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a Hugging Face directory or a .gguf file. Raises ModelError."""
    config = config_from_directory(path) if path.is_dir() else config_from_gguf(path)
    config.check(path)
    return config


def resolve_dtype(config: ModelConfig, dtype: str, device: str) -> str:
    """Return the dtype that `auto` means on a device: the checkpoint's on CUDA, float32 on the CPU.

    Raises ValueError for a dtype that is neither `auto` nor a key of DTYPES.
    """
    if dtype == "auto":
        return config.checkpoint_dtype if device.startswith("cuda") else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be auto, {', '.join(DTYPES)}, is {dtype!r}")
    return dtype
