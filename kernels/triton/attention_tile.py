"""One tile of keys and values added to a running softmax: what decode and prefill attention share.

Scores are kept unscaled and scaled by an explicit fused multiply-add, so that a masked and an unmasked tile
round alike and a row's result does not depend on which of them its neighbours needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores: tl.tensor, score_scale: tl.tensor) -> tl.tensor:
    """Return tanh(scores * score_scale) by way of one exponential. scores: float32."""
    return 2.0 / (1.0 + tl.exp2(scores * score_scale * -2.8853900817779268)) - 1.0


@triton.jit
def add_tile(
    scores: tl.tensor,
    value: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    exponent_scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return total, weight and largest with one tile added (Milakov and Gimelshein 2018, arXiv 1805.02867).

    scores:  [rows, keys] float32, -Inf where a key is not visible
    value:   [keys, head_dim]
    total:   [rows, head_dim] float32, relative to 2 ** (largest * exponent_scale), as is weight [rows]
    """
    highest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet must not compute Inf - Inf.
    origin = tl.where(highest == -float("inf"), 0.0, highest) * exponent_scale
    fade = tl.exp2(tl.fma(largest, exponent_scale, -origin))
    shares = tl.exp2(tl.fma(scores, exponent_scale, -origin[:, None]))
    weight = weight * fade + tl.sum(shares, 1)
    total = tl.dot(shares.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
    return total, weight, highest
