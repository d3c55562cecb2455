"""The rotary frequencies of a layer, with the scaling of its configuration applied."""

from __future__ import annotations

import math

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import Rope, RopeScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return [head_dim / 2] float32 radians per position. Raises ModelError for an unknown scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, rope.theta)
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    raise ModelError(f"rope scaling {scaling.kind!r} is not supported")


def magnitude(rope: Rope) -> float:
    """Return by what cosines and sines are multiplied."""
    return 1.0 if rope.scaling is None else rope.scaling.magnitude


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow waves are divided by the factor, fast ones kept, those between blended (Llama 3.1's rule)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_context / wavelengths
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """The same idea blended along the index of the frequency (Peng et al. 2023, arXiv 2309.00071)."""
    pairs: int = frequencies.numel()

    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency that turns so often over the original context."""
        return pairs * math.log(scaling.original_max_context / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # as transformers avoids the division by zero
    slow = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return slow * frequencies / scaling.factor + (1 - slow) * frequencies
