"""Which tokens of a distribution may be chosen: top-k, top-p, min-p and typical-p, many rows at once.

Each filter keeps the tokens whose key is at least a limit, so tokens that tie at the edge are kept alike,
and each sees what the one before left, renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvhive.kernels.host_values import on_device

_PROBE = 256
"""Tokens first sorted for top-p and typical-p. They rarely need more; a full sort costs 40 times as much."""

WIDEN = 8
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


def filter_tokens(
    scores: torch.Tensor, rows: Sequence[TokenFilters], probe: int | None = None
) -> torch.Tensor | None:
    """Set the scores of tokens that are not kept to -Inf, in place. The likeliest token of a row may go
    only by typical_p.

    scores: [len(rows), vocab_size] float64, logits less their row's largest, so that this is 0
    probe: most tokens that top-p and typical-p sort; None sorts as many as they need, and looks at results
           to know: that waits for a device

    With a probe, returns which rows it was too narrow for: [len(rows)] bool. Those are not filtered rightly.
    """
    vocab_size = scores.shape[1]
    narrow = None if probe is None else torch.zeros(len(rows), dtype=torch.bool, device=scores.device)
    if chosen := [i for i, row in enumerate(rows) if 0 < row.top_k < vocab_size]:
        where, part = _pick(scores, chosen)
        counts = on_device([rows[i].top_k for i in chosen], torch.int64, scores.device)[:, None]
        largest = part.topk(max(rows[i].top_k for i in chosen), dim=-1).values
        _keep(scores, where, part, largest.gather(1, counts - 1))
    if chosen := [i for i, row in enumerate(rows) if row.top_p < 1]:
        where, part = _pick(scores, chosen)
        wanted = _column([rows[i].top_p for i in chosen], part)
        limits = _last_needed(part, part.softmax(dim=-1), wanted, probe)
        _keep(scores, where, part, limits.keys)
        _note(narrow, where, limits.narrow)
    if chosen := [i for i, row in enumerate(rows) if row.min_p > 0]:
        where, part = _pick(scores, chosen)
        _keep(scores, where, part, _column([rows[i].min_p for i in chosen], part).log_())
    if chosen := [i for i, row in enumerate(rows) if row.typical_p < 1]:
        where, part = _pick(scores, chosen)
        keys, probabilities = _typicality(part)
        wanted = _column([rows[i].typical_p for i in chosen], part)
        limits = _last_needed(keys, probabilities, wanted, probe)
        _keep(scores, where, keys, limits.keys)
        _note(narrow, where, limits.narrow)
    return narrow


def _typicality(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token -|information - entropy|, the higher the more typical, and its probability."""
    information = scores.log_softmax(dim=-1).neg_()
    probabilities = information.neg().exp_()
    # 0 * Inf is 0 here: a token that is not kept carries no information.
    entropy = (probabilities * information).nan_to_num_(nan=0.0).sum(dim=-1, keepdim=True)
    return information.sub_(entropy).abs_().neg_(), probabilities


class _Limits(NamedTuple):
    keys: torch.Tensor
    """[n, 1]: the key of the last token that is needed."""
    narrow: torch.Tensor | None
    """[n] bool: that token was not found; None where it always is."""


def _last_needed(
    keys: torch.Tensor, probabilities: torch.Tensor, wanted: torch.Tensor, probe: int | None
) -> _Limits:
    """Take tokens by descending key until they have the wanted probability; return the last one's key.

    keys, probabilities: [n, vocab_size]; wanted: [n, 1]; probe: as in filter_tokens
    """
    vocab_size = keys.shape[1]
    if probe is not None:
        found, needed = _search(keys, probabilities, wanted, min(probe, vocab_size))
        return _Limits(found, needed[:, 0] >= probe)
    limits = torch.empty_like(wanted)
    pending = torch.arange(keys.shape[0], device=keys.device)
    width = min(_PROBE, vocab_size)
    while True:
        whole = pending.shape[0] == keys.shape[0]
        parts = (keys, probabilities) if whole else (keys[pending], probabilities[pending])
        limits[pending], needed = _search(*parts, wanted[pending], width)
        pending = pending[needed[:, 0] >= width]
        if width == vocab_size or not pending.shape[0]:
            return _Limits(limits, None)
        width = min(width * WIDEN, vocab_size)


def _search(
    keys: torch.Tensor, probabilities: torch.Tensor, wanted: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last needed one's key, and how many tokens come before it: `width` if there are more."""
    best = keys.topk(width, dim=-1)
    mass = probabilities.gather(1, best.indices).cumsum_(dim=-1)
    needed = (mass < wanted * _REACHED).sum(dim=-1, keepdim=True)
    return best.values.gather(1, needed.clamp(max=width - 1)), needed


def _keep(scores: torch.Tensor, where: torch.Tensor | None, keys: torch.Tensor, limits: torch.Tensor) -> None:
    """Keep those of the chosen rows' tokens whose key is at least their row's limit."""
    if where is None:
        scores.masked_fill_(keys < limits, -torch.inf)
    else:
        kept = scores.index_select(0, where).masked_fill_(keys < limits, -torch.inf)
        scores.index_copy_(0, where, kept)


def _note(narrow: torch.Tensor | None, where: torch.Tensor | None, found: torch.Tensor | None) -> None:
    """Add what one filter found to the rows that it was for."""
    if narrow is None or found is None:
        return
    if where is None:
        narrow |= found
    else:
        narrow.index_copy_(0, where, narrow.index_select(0, where) | found)


def _pick(scores: torch.Tensor, chosen: list[int]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the chosen rows' indices, None for all, and the rows."""
    if len(chosen) == scores.shape[0]:
        return None, scores
    where = on_device(chosen, torch.int64, scores.device)
    return where, scores.index_select(0, where)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return on_device(values, like.dtype, like.device)[:, None]
