"""Read a model's configuration from its files. No torch here: the pool is sized without it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from kvhive.worker.config_json import architecture, read_json
from kvhive.worker.cpu_features import has_bfloat16
from kvhive.worker.decoder_config import DTYPES, DecoderConfig
from kvhive.worker.decoder_config_gguf import config_from_gguf
from kvhive.worker.decoder_config_hf import FAMILIES, decoder_config_from_json
from kvhive.worker.transformers_config import TransformersConfig, transformers_config_from_json

__all__ = ["DTYPES", "ModelConfig", "read_model_config", "resolve_dtype"]

ModelConfig: TypeAlias = DecoderConfig | TransformersConfig
"""What is known of a model before its weights are loaded, whoever computes it."""


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a Hugging Face directory or a .gguf file.

    Raises ModelError for what is missing or malformed, and for a model that cannot be served, with the
    name of its architecture and the reason.
    """
    config = _from_directory(path) if path.is_dir() else config_from_gguf(path)
    config.check(path)
    return config


def _from_directory(path: Path) -> ModelConfig:
    fields = read_json(path / "config.json")
    if architecture(fields) in FAMILIES:
        return decoder_config_from_json(fields)
    return transformers_config_from_json(fields)


def resolve_dtype(config: ModelConfig, dtype: str, device: str) -> str:
    """Return the dtype that `auto` means on a device of this machine.

    The checkpoint's on CUDA; on a CPU bfloat16 where it has instructions for it, else float32. Raises
    ValueError for a dtype that is neither `auto` nor a key of DTYPES.
    """
    if dtype == "auto":
        if device.startswith("cuda"):
            return config.checkpoint_dtype
        return "bfloat16" if has_bfloat16() else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be auto, {', '.join(DTYPES)}, is {dtype!r}")
    return dtype
