"""Which tokens of a distribution may be chosen: top-k, top-p, min-p and typical-p, many rows at once.

Each filter keeps the tokens whose key is at least a limit, so tokens that tie at the edge are kept alike,
and each sees what the one before left, renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PROBE = 256
"""Tokens first sorted for top-p and typical-p. They rarely need more; a full sort costs 40 times as much."""

_WIDEN = 8
"""By how much the probe grows for rows that it was too narrow for."""

_REACHED = 1 - 1e-12
"""A sum within rounding of the wanted probability has reached it, so that batch mates cannot tip it."""


@dataclass(frozen=True, slots=True)
class TokenFilters:
    """The filters of one row, in the order in which they apply."""

    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that has this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest."""
    typical_p: float = 1.0
    """Keep the smallest set with this probability of tokens whose information is nearest to the entropy
    (Meister et al. 2023, "Locally typical sampling")."""

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k: needs >= 0, is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: needs 0 < top_p <= 1, is {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: needs 0 <= min_p <= 1, is {self.min_p}")
        if not 0 < self.typical_p <= 1:
            raise ValueError(f"typical_p: needs 0 < typical_p <= 1, is {self.typical_p}")


def filter_tokens(scores: torch.Tensor, rows: Sequence[TokenFilters]) -> None:
    """Set the scores of tokens that are not kept to -Inf, in place. The likeliest token of a row may go
    only by typical_p.

    scores: [len(rows), vocab_size] float64, logits less their row's largest, so that this is 0
    """
    vocab_size = scores.shape[1]
    if chosen := [i for i, row in enumerate(rows) if 0 < row.top_k < vocab_size]:
        part = _pick(scores, chosen)
        counts = torch.tensor([rows[i].top_k for i in chosen], device=scores.device)[:, None]
        largest = part.topk(int(counts.max()), dim=-1).values
        _keep(scores, chosen, part, largest.gather(1, counts - 1))
    if chosen := [i for i, row in enumerate(rows) if row.top_p < 1]:
        part = _pick(scores, chosen)
        wanted = _column([rows[i].top_p for i in chosen], part)
        _keep(scores, chosen, part, _last_needed(part, part.softmax(dim=-1), wanted))
    if chosen := [i for i, row in enumerate(rows) if row.min_p > 0]:
        part = _pick(scores, chosen)
        _keep(scores, chosen, part, _column([rows[i].min_p for i in chosen], part).log_())
    if chosen := [i for i, row in enumerate(rows) if row.typical_p < 1]:
        part = _pick(scores, chosen)
        keys, probabilities = _typicality(part)
        wanted = _column([rows[i].typical_p for i in chosen], part)
        _keep(scores, chosen, keys, _last_needed(keys, probabilities, wanted))


def _typicality(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token -|information - entropy|, the higher the more typical, and its probability."""
    information = scores.log_softmax(dim=-1).neg_()
    probabilities = information.neg().exp_()
    # 0 * Inf is 0 here: a token that is not kept carries no information.
    entropy = (probabilities * information).nan_to_num_(nan=0.0).sum(dim=-1, keepdim=True)
    return information.sub_(entropy).abs_().neg_(), probabilities


def _last_needed(keys: torch.Tensor, probabilities: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Take tokens by descending key until they have the wanted probability; return the last one's key.

    keys, probabilities: [n, vocab_size]; wanted: [n, 1]. Returns [n, 1].
    """
    limits = torch.empty_like(wanted)
    pending = torch.arange(keys.shape[0], device=keys.device)
    width = min(_PROBE, keys.shape[1])
    while True:
        whole = pending.shape[0] == keys.shape[0]
        best = (keys if whole else keys[pending]).topk(width, dim=-1)
        mass = (probabilities if whole else probabilities[pending]).gather(1, best.indices).cumsum_(dim=-1)
        needed = (mass < wanted[pending] * _REACHED).sum(dim=-1, keepdim=True)
        limits[pending] = best.values.gather(1, needed.clamp(max=width - 1))
        pending = pending[needed[:, 0] >= width]
        if width == keys.shape[1] or not pending.shape[0]:
            return limits
        width = min(width * _WIDEN, keys.shape[1])


def _keep(scores: torch.Tensor, chosen: list[int], keys: torch.Tensor, limits: torch.Tensor) -> None:
    """Keep those of the chosen rows' tokens whose key is at least their row's limit."""
    if len(chosen) == scores.shape[0]:
        scores.masked_fill_(keys < limits, -torch.inf)
    else:
        scores[chosen] = scores[chosen].masked_fill_(keys < limits, -torch.inf)


def _pick(scores: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    return scores if len(chosen) == scores.shape[0] else scores[chosen]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
