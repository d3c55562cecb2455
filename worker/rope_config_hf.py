"""Read the rotary embedding from a config.json, in the form of transformers 5 or in the one before."""

from __future__ import annotations

import math

from kvhive.proto.errors import ModelError
from kvhive.worker.config_json import Fields
from kvhive.worker.decoder_config import Rope, RopeScaling

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_of(config: Fields, theta: float = 10000.0) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`. Raises ModelError for an unknown scaling.

    theta: what the architecture takes where the file says nothing
    """
    values = config.mapping("rope_parameters" if config.raw.get("rope_parameters") else "rope_scaling")
    return _rope(config, values, config.number("rope_theta", theta))


def gemma3_ropes(config: Fields) -> tuple[Rope, Rope]:
    """Read the embedding of Gemma 3's full layers and of its sliding ones."""
    full_theta = config.number("rope_theta", 1_000_000.0)
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    if not config.raw.get("rope_parameters"):
        return _rope(config, config.mapping("rope_scaling"), full_theta), Rope(local_theta)
    both = config.mapping("rope_parameters")
    return (
        _rope(config, both.mapping("full_attention"), full_theta),
        _rope(config, both.mapping("sliding_attention"), local_theta),
    )


def _rope(config: Fields, values: Fields, theta: float) -> Rope:
    theta = values.number("rope_theta", theta)
    if values.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{config.path}: partial rotary embedding is not supported")
    kind = values.raw.get("rope_type") or values.raw.get("type") or "default"
    if kind in ("default", "dynamic"):
        # dynamic changes frequencies only beyond max_position_embeddings, which is where we end: a cached
        # key could not follow the change.
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", values.number("factor")))
    if kind not in ("llama3", "yarn"):
        raise ModelError(f"{config.path}: rope scaling {kind!r} is not supported; {', '.join(_KINDS)} are")
    original = config.integer(
        "original_max_position_embeddings",
        values.integer("original_max_position_embeddings", config.integer("max_position_embeddings", 2048)),
    )
    if kind == "yarn":
        return Rope(theta, _yarn(config, values, original))
    return Rope(
        theta,
        RopeScaling(
            "llama3",
            values.number("factor"),
            values.number("low_freq_factor"),
            values.number("high_freq_factor"),
            original,
        ),
    )


def _yarn(config: Fields, values: Fields, original: int) -> RopeScaling:
    """Read YaRN (Peng et al. 2023, arXiv 2309.00071), with DeepSeek's way to state the magnitude."""
    factor = values.number("factor", config.integer("max_position_embeddings", 2048) / max(original, 1))
    magnitude = values.optional_number("attention_factor")
    if magnitude is None:
        one, all_dim = values.number("mscale", 0.0), values.number("mscale_all_dim", 0.0)
        magnitude = yarn_magnitude(factor)
        if one and all_dim:
            magnitude = yarn_magnitude(factor, one) / yarn_magnitude(factor, all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original_max_context=original,
        # Zero means "not given" in files that transformers reads.
        beta_fast=values.number("beta_fast", 0.0) or 32.0,
        beta_slow=values.number("beta_slow", 0.0) or 1.0,
        magnitude=magnitude,
        truncate=values.flag("truncate", True),
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN stretches rotated vectors for a context `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
