"""Choose the next token of each row, independently of the other rows.

In this order: bias, penalties and forbidden tokens change the logits (penalties.py); temperature divides
them; filters keep a part of them (token_filters.py). The choice itself is Gumbel-max: argmax(logits /
temperature + noise) over the kept tokens is a draw from their softmax. So a row's token is a function of its
logits, options, history and (seed, choice, position), and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvhive.kernels.penalties import PenaltyRow, apply_penalties
from kvhive.kernels.philox import GUMBEL_RANGE, NoiseStream, gumbel_noise, gumbel_noise_at
from kvhive.kernels.token_filters import TokenFilters, filter_tokens

_CPU_SLICE = 1 << 18
"""Logits that are sampled together on the CPU: their float64 copies stay in its caches."""

_DEVICE_SLICE = 1 << 24
"""... and on another device, where launches cost more: 128 MiB of float64 and a few times that in passing."""

_SPARSE = 8
"""Noise is drawn token by token where fewer than one in so many is kept; else four neighbours share it."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled."""

    temperature: float = 0.0
    """0 is greedy; ties go to the lowest token id."""
    filters: TokenFilters = field(default_factory=TokenFilters)
    penalties: PenaltyRow | None = None
    stream: NoiseStream = field(default_factory=lambda: NoiseStream(0, 0, 0))


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Return one token id per row, or None where there is none to choose.

    logits: [len(rows), vocab_size], any float dtype, not changed. A single -Inf forbids a token. NaN, +Inf
    or nothing but -Inf gives None, and the other rows do not suffer.

    Raises ValueError when shapes do not fit or a parameter is out of range. One device sync for the batch
    when all rows are greedy without penalties, a few more for each slice of other rows.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits: needs [{len(rows)}, vocab_size], is {tuple(logits.shape)}")
    for row in rows:
        if not 0 <= row.temperature < float("inf"):
            raise ValueError(f"temperature: needs a finite number >= 0, is {row.temperature}")
    if not rows:
        return []
    tokens = _settle(logits.amax(dim=-1), logits.argmax(dim=-1))
    rest = [
        i for i, row in enumerate(rows) if tokens[i] is not None and (row.temperature > 0 or row.penalties)
    ]
    size = max(1, (_CPU_SLICE if logits.device.type == "cpu" else _DEVICE_SLICE) // logits.shape[1])
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        for i, token in zip(part, _sample_slice(logits[part], [rows[i] for i in part]), strict=True):
            tokens[i] = token
    return tokens


def _sample_slice(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Sample rows whose logits are finite; a row may still lose its last token to what is forbidden."""
    scores = logits.double()
    apply_penalties(scores, [row.penalties for row in rows])
    largest, tokens = scores.amax(dim=-1), scores.argmax(dim=-1)
    if any(row.penalties for row in rows):
        # What is drawn from a row that has lost all its tokens is thrown away; it must only be a number.
        scores.masked_fill_(~torch.isfinite(largest)[:, None], 0.0)
    if warm := [i for i, row in enumerate(rows) if row.temperature > 0]:
        drawn = [rows[i] for i in warm]
        # Relative to the largest, so that no temperature, however small, can overflow to Inf - Inf.
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        part = scores if len(warm) == len(rows) else scores[warm]
        part.div_(torch.tensor([row.temperature for row in drawn], dtype=part.dtype).to(part.device)[:, None])
        filter_tokens(part, [row.filters for row in drawn])
        tokens[warm] = _draw(part, [row.stream for row in drawn])
    return _settle(largest, tokens)


def _draw(scores: torch.Tensor, streams: Sequence[NoiseStream]) -> torch.Tensor:
    """Return one token per row: [rows] int64. Only tokens that can win are given their noise."""
    can_win = scores >= scores.amax(dim=-1, keepdim=True) - GUMBEL_RANGE
    if int(can_win.sum()) * _SPARSE > scores.numel():
        return scores.add_(gumbel_noise(scores.shape[1], streams, scores.device)).argmax(dim=-1)
    row_of, kept = torch.nonzero(can_win, as_tuple=True)
    noisy = scores[row_of, kept].add_(gumbel_noise_at(kept, row_of, streams))
    # Kept tokens of a row lie together, ascending; side by side, an argmax finds each row's first winner.
    counts = torch.bincount(row_of, minlength=len(streams))
    first = counts.cumsum(0) - counts
    table = noisy.new_full((len(streams), int(counts.max())), -torch.inf)
    table[row_of, torch.arange(kept.shape[0], device=kept.device) - first[row_of]] = noisy
    return kept[first + table.argmax(dim=-1)]


def _settle(largest: torch.Tensor, tokens: torch.Tensor) -> list[int | None]:
    """Bring tokens to the host in one transfer; None where the row's largest logit is not finite."""
    report: list[list[float]] = torch.stack((torch.isfinite(largest).double(), tokens.double())).tolist()
    return [int(token) if ok else None for ok, token in zip(*report, strict=True)]
