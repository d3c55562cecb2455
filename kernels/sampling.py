"""Choose the next token of each row, independently of the other rows.

In this order: bias, penalties and forbidden tokens change the logits (penalties.py); temperature divides
them; filters keep a part of them (token_filters.py). The choice itself is Gumbel-max: argmax(logits /
temperature + noise) over the kept tokens is a draw from their softmax. So a row's token is a function of its
logits, options, history and (seed, choice, position), and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvhive.kernels.host_values import on_device
from kvhive.kernels.operators import operators_for
from kvhive.kernels.penalties import PenaltyRow, apply_penalties
from kvhive.kernels.philox import GUMBEL_RANGE, NoiseStream, gumbel_noise_at
from kvhive.kernels.token_filters import WIDEN, TokenFilters, filter_tokens

_CPU_SLICE = 1 << 18
"""Logits that are sampled together on the CPU: their float64 copies stay in its caches."""

_DEVICE_SLICE = 1 << 24
"""... and on another device, where launches cost more: 128 MiB of float64 and a few times that in passing."""

_DEVICE_PROBE = 1024
"""Tokens that top-p and typical-p sort at first on another device, where looking whether they were enough
would wait for all that was launched. The few rows that need more are sampled again."""

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

    Raises ValueError when shapes do not fit or a parameter is out of range. A device is waited for once, for
    the tokens; again for rows whose top-p or typical-p needs more than _DEVICE_PROBE tokens, and a few times
    where penalties count a history, or tokens are forbidden or have a bias.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits: needs [{len(rows)}, vocab_size], is {tuple(logits.shape)}")
    for row in rows:
        if not 0 <= row.temperature < float("inf"):
            raise ValueError(f"temperature: needs a finite number >= 0, is {row.temperature}")
    if not rows:
        return []
    largest, tokens = operators_for(logits).greedy(logits)
    draft = _Draft(torch.isfinite(largest), tokens, torch.zeros_like(tokens, dtype=torch.bool))
    looks = _looks_are_free(logits.device)
    probe = None if looks else _DEVICE_PROBE
    size = max(1, (_CPU_SLICE if looks else _DEVICE_SLICE) // logits.shape[1])
    pending = [i for i, row in enumerate(rows) if row.temperature > 0 or row.penalties]
    while True:
        for start in range(0, len(pending), size):
            part = pending[start : start + size]
            where = on_device(part, torch.int64, logits.device)
            own = _sample_slice(logits.index_select(0, where), [rows[i] for i in part], probe)
            draft.put(where, own)
        chosen, narrow = draft.read()
        pending = [i for i in pending if narrow[i]]
        if probe is None or not pending:
            return chosen
        probe *= WIDEN


def _looks_are_free(device: torch.device) -> bool:
    """Whether reading a result waits for nothing else."""
    return str(device.type) == "cpu"


class _Draft(NamedTuple):
    """What was chosen for some rows, on their device."""

    fine: torch.Tensor
    """[rows] bool: there is something to choose from."""
    tokens: torch.Tensor
    """[rows] int64."""
    narrow: torch.Tensor
    """[rows] bool: the choice does not count, because too few tokens were sorted for it."""

    def put(self, where: torch.Tensor, own: _Draft) -> None:
        """Write in what was chosen for the rows at `where` [n]."""
        self.fine.index_copy_(0, where, self.fine.index_select(0, where) & own.fine)
        self.tokens.index_copy_(0, where, own.tokens)
        self.narrow.index_copy_(0, where, own.narrow)

    def read(self) -> tuple[list[int | None], list[bool]]:
        """Bring tokens to the host, None where there is none, and `narrow`: in one transfer."""
        report: list[list[float]] = torch.stack([each.double() for each in self]).tolist()
        fine, tokens, narrow = report
        chosen = [int(token) if ok else None for ok, token in zip(fine, tokens, strict=True)]
        return chosen, [bool(each) for each in narrow]


def _sample_slice(logits: torch.Tensor, rows: Sequence[SamplingRow], probe: int | None) -> _Draft:
    """Sample some rows; `probe` as in token_filters, None where looking at results costs nothing."""
    scores = logits.double()
    apply_penalties(scores, [row.penalties for row in rows])
    largest, tokens = scores.amax(dim=-1), scores.argmax(dim=-1)
    fine, narrow = torch.isfinite(largest), torch.zeros_like(tokens, dtype=torch.bool)
    if probe is not None or not bool(fine.all()):
        # What is drawn from a row that has nothing to choose from is thrown away; it must only be a number.
        scores.masked_fill_(~fine[:, None], 0.0)
    if warm := [i for i, row in enumerate(rows) if row.temperature > 0]:
        drawn, where = [rows[i] for i in warm], on_device(warm, torch.int64, scores.device)
        # Relative to the largest, so that no temperature, however small, can overflow to Inf - Inf.
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        part = scores if len(warm) == len(rows) else scores.index_select(0, where)
        part.div_(on_device([row.temperature for row in drawn], part.dtype, part.device)[:, None])
        too_narrow = filter_tokens(part, [row.filters for row in drawn], probe)
        if too_narrow is not None:
            narrow.index_copy_(0, where, too_narrow & fine.index_select(0, where))
        tokens.index_copy_(0, where, _draw(part, [row.stream for row in drawn], looks=probe is None))
    return _Draft(fine, tokens, narrow)


def _draw(scores: torch.Tensor, streams: Sequence[NoiseStream], looks: bool) -> torch.Tensor:
    """Return one token per row: [rows] int64. Who may look gives noise only to tokens that can win."""
    if not looks:
        return operators_for(scores).gumbel_argmax(scores, streams)
    can_win = scores >= scores.amax(dim=-1, keepdim=True) - GUMBEL_RANGE
    if int(can_win.sum()) * _SPARSE > scores.numel():
        return operators_for(scores).gumbel_argmax(scores, streams)
    row_of, kept = torch.nonzero(can_win, as_tuple=True)
    noisy = scores[row_of, kept].add_(gumbel_noise_at(kept, row_of, streams))
    # Kept tokens of a row lie together, ascending; side by side, an argmax finds each row's first winner.
    counts = torch.bincount(row_of, minlength=len(streams))
    first = counts.cumsum(0) - counts
    table = noisy.new_full((len(streams), int(counts.max())), -torch.inf)
    table[row_of, torch.arange(kept.shape[0], device=kept.device) - first[row_of]] = noisy
    return kept[first + table.argmax(dim=-1)]
