"""Choose the next token of each row, independently of the other rows.

Each filter is a threshold on the logits, so all of them together are one comparison, and tokens that tie
at the edge are kept alike. The choice itself is Gumbel-max: argmax(logits / temperature + noise) over the
kept tokens is a draw from their softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvhive.kernels.philox import gumbel_noise

_PROBE = 256
"""Candidates first looked at for top-p; a nucleus is rarely wider, and a full sort costs 40 times more."""


class NonFiniteLogits(ArithmeticError):
    """A row of logits holds NaN or +Inf, or nothing but -Inf: there is no token to choose."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of row(s) {list(rows)} are not finite")
        self.rows = tuple(rows)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled."""

    temperature: float = 0.0
    """0 is greedy; ties go to the lowest token id."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens (after top_k, renormalised) that has this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest."""
    seed: int = 0
    """64-bit."""
    position: int = 0
    """Index in its sequence of the token to choose."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return one token id per row.

    logits: [len(rows), vocab_size], any float dtype. A single -Inf forbids a token; NaN, +Inf or only -Inf
    raise NonFiniteLogits. Raises ValueError when shapes do not fit or a parameter is out of range.
    One device sync for the batch when all rows are greedy, a few more for each sampled row.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits: needs [{len(rows)}, vocab_size], is {tuple(logits.shape)}")
    if not rows:
        return []
    for row in rows:
        _check(row)
    largest, greedy = logits.max(dim=-1).values, logits.argmax(dim=-1)
    report: list[list[float]] = torch.stack((torch.isfinite(largest).double(), greedy.double())).tolist()
    finite, tokens = report
    bad = [index for index, ok in enumerate(finite) if not ok]
    if bad:
        raise NonFiniteLogits(bad)
    return [
        int(tokens[index]) if row.temperature == 0 else _draw(logits[index], row)
        for index, row in enumerate(rows)
    ]


def _check(row: SamplingRow) -> None:
    if not 0 <= row.temperature < float("inf"):
        raise ValueError(f"temperature: needs a finite number >= 0, is {row.temperature}")
    if row.top_k < 0:
        raise ValueError(f"top_k: needs >= 0, is {row.top_k}")
    if not 0 < row.top_p <= 1:
        raise ValueError(f"top_p: needs 0 < top_p <= 1, is {row.top_p}")
    if not 0 <= row.min_p <= 1:
        raise ValueError(f"min_p: needs 0 <= min_p <= 1, is {row.min_p}")


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    wide = logits.double()
    # Relative to the largest, so that no temperature, however small, can overflow to Inf - Inf.
    scores = (wide - wide.max()) / row.temperature
    kept = torch.nonzero(scores >= _threshold(scores, row)).flatten()
    noisy = scores[kept] + gumbel_noise(kept, row.seed, row.position)
    return int(kept[noisy.argmax()])


def _threshold(scores: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Return the least score that every filter keeps; the largest score (0) is always kept."""
    threshold = torch.full_like(scores[0], -torch.inf)
    if 0 < row.top_k < scores.shape[0]:
        threshold = torch.topk(scores, row.top_k).values[-1]
    if row.top_p < 1:
        threshold = _nucleus(scores.masked_fill(scores < threshold, -torch.inf), row.top_p)
    if row.min_p > 0:
        threshold = torch.maximum(
            threshold, torch.tensor(row.min_p, dtype=torch.float64).log().to(scores.device)
        )
    # -Inf scores are forbidden tokens, even where nothing is filtered.
    return torch.clamp(threshold, min=torch.finfo(torch.float64).min)


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the score of the last token that is needed to reach top_p."""
    total = torch.logsumexp(scores, 0)
    width = min(_PROBE, scores.shape[0])
    while True:
        values = torch.topk(scores, width).values
        mass = (values - total).exp().cumsum(0)
        if width == scores.shape[0] or bool(mass[-1] >= top_p):
            break
        width = min(width * 8, scores.shape[0])
    needed = int((mass < top_p).sum())
    return values[min(needed, width - 1)]
