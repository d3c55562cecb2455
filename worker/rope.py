"""The rotary frequencies of a model, with the scaling of its configuration applied."""

from __future__ import annotations

import math

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig, RopeScaling


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Return [head_dim / 2] float32 radians per position. Raises ModelError for an unknown scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    raise ModelError(f"rope scaling {scaling.kind!r} is not supported")


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow waves are divided by the factor, fast ones kept, those between blended (Llama 3.1's rule)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_context / wavelengths
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
