"""Exact distributions by sorting everything, and the test that draws follow them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def exact(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> torch.Tensor:
    """Probabilities after temperature, then top-k, top-p, min-p and typical-p, each renormalised."""
    probabilities = (logits.double() / temperature).softmax(0)

    def keep(order: torch.Tensor, count: int) -> torch.Tensor:
        kept = torch.zeros_like(probabilities)
        kept[order[:count]] = probabilities[order[:count]]
        return kept / kept.sum()

    def needed(order: torch.Tensor, mass: float) -> int:
        return int((probabilities[order].cumsum(0) < mass).sum()) + 1

    if top_k:
        probabilities = keep(probabilities.argsort(descending=True), top_k)
    if top_p < 1:
        order = probabilities.argsort(descending=True)
        probabilities = keep(order, needed(order, top_p))
    order = probabilities.argsort(descending=True)
    probabilities = keep(order, int((probabilities >= min_p * probabilities.max()).sum()))
    if typical_p < 1:
        information = -probabilities.log()
        entropy = (probabilities * information).nansum()
        order = (information - entropy).abs().argsort()
        probabilities = keep(order, needed(order, typical_p))
    return probabilities


def assert_follows(draws: Sequence[int], expected: torch.Tensor) -> None:
    """Chi-square over tokens expected five times or more, at p = 0.01; nothing outside the support."""
    counts = torch.bincount(torch.tensor(draws), minlength=expected.shape[0]).double()
    assert counts[expected == 0].sum() == 0, "a token outside the support was drawn"
    wanted = expected * len(draws)
    common = wanted >= 5
    rare = torch.stack((counts[~common].sum(), wanted[~common].sum()))
    pairs = torch.stack((counts[common], wanted[common]))
    if rare[1] >= 5:
        pairs = torch.cat((pairs, rare[:, None]), dim=1)
    statistic = float(((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum())
    freedom = max(1, pairs.shape[1] - 1)
    # Wilson and Hilferty's approximation of the value that is exceeded once in a hundred.
    limit = freedom * (1 - 2 / (9 * freedom) + 2.326 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f} at {freedom} degrees of freedom"
