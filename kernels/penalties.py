"""What changes a row's logits before anything else: bias, penalties on repetition, what may not be chosen.

Repetition counts prompt and output (Keskar et al. 2019, "CTRL"); frequency and presence count the output
only, as in the OpenAI API. The border between the two is given, never guessed from what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyRow:
    """How one row's logits are changed."""

    repetition: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the history; 1 changes nothing."""
    frequency: float = 0.0
    """Subtracted once per occurrence in the output."""
    presence: float = 0.0
    """Subtracted once from every token of the output."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added); entries of one id add up."""
    forbidden: frozenset[int] = frozenset()
    """Tokens that must not be chosen; ids outside the vocabulary cannot be chosen anyway."""
    history: torch.Tensor | None = None
    """[n] int64: prompt, then output. None where nothing counts it."""
    prompt_tokens: int = 0
    """How many of `history` are the prompt."""
    allowed: torch.Tensor | None = None
    """[words] int32 on the host: bit t % 32 of word t // 32 says whether token t may be chosen; what has no
    bit may not. None allows all."""


def apply_penalties(logits: torch.Tensor, rows: Sequence[PenaltyRow | None]) -> None:
    """Change the logits in place: bias, then repetition, frequency and presence, then what may not be chosen.

    logits: [len(rows), vocab_size], contiguous, float32 or wider; a row that is None stays as it is

    Raises ValueError when a number is out of range or a bias names a token outside the vocabulary. Costs in
    proportion to the histories, not to the vocabulary.
    """
    for row in rows:
        if row is not None:
            _check(row, logits.shape[1])
    _add_bias(logits, rows)
    _penalise(logits, rows)
    vocab_size = logits.shape[1]
    forbidden = [
        index * vocab_size + token
        for index, row in enumerate(rows)
        if row is not None
        for token in row.forbidden
        if 0 <= token < vocab_size
    ]
    if forbidden:
        logits.view(-1)[torch.tensor(forbidden, device=logits.device)] = -torch.inf
    _keep_allowed(logits, rows)


def _check(row: PenaltyRow, vocab_size: int) -> None:
    if not 0 < row.repetition < math.inf:
        raise ValueError(f"repetition: needs a finite number > 0, is {row.repetition}")
    if not (math.isfinite(row.frequency) and math.isfinite(row.presence)):
        raise ValueError(f"frequency, presence: need finite numbers, are {row.frequency}, {row.presence}")
    for token, value in row.bias:
        if not 0 <= token < vocab_size or not math.isfinite(value):
            raise ValueError(
                f"bias: needs a finite number for a token below {vocab_size}, is {token}: {value}"
            )


def _add_bias(logits: torch.Tensor, rows: Sequence[PenaltyRow | None]) -> None:
    entries = [
        (index * logits.shape[1] + token, value)
        for index, row in enumerate(rows)
        if row is not None
        for token, value in row.bias
    ]
    if entries:
        where, values = zip(*entries, strict=True)
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits.view(-1).index_add_(0, torch.tensor(where, device=logits.device), added)


def _penalise(logits: torch.Tensor, rows: Sequence[PenaltyRow | None]) -> None:
    """One gather and one scatter for all rows: only tokens of the histories are touched."""
    device, vocab_size = logits.device, logits.shape[1]
    where, in_output = [], []
    for index, row in enumerate(rows):
        if row is None or row.history is None:
            continue
        # The prompt matters to repetition alone.
        first = 0 if row.repetition != 1 else row.prompt_tokens
        tokens = row.history[first:].to(device)
        where.append(tokens + index * vocab_size)
        in_output.append(torch.arange(first, first + tokens.shape[0], device=device) >= row.prompt_tokens)
    if not where:
        return
    cells, cell_of = torch.unique(torch.cat(where), return_inverse=True)
    counts = torch.zeros(cells.shape[0], dtype=logits.dtype, device=device)
    counts.index_add_(0, cell_of, torch.cat(in_output).to(logits.dtype))
    amounts = torch.tensor(
        [(row.repetition, row.frequency, row.presence) if row else (1.0, 0.0, 0.0) for row in rows],
        dtype=logits.dtype,
        device=device,
    )
    repetition, frequency, presence = amounts[cells // vocab_size].unbind(-1)
    values = logits.view(-1)[cells]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits.view(-1)[cells] = values - counts * frequency - (counts > 0) * presence


def _keep_allowed(logits: torch.Tensor, rows: Sequence[PenaltyRow | None]) -> None:
    """Set to -Inf what a row's `allowed` has no bit for."""
    masked = [(index, row.allowed) for index, row in enumerate(rows) if row and row.allowed is not None]
    if not masked:
        return
    device, vocab_size = logits.device, logits.shape[1]
    words = torch.stack([allowed for _, allowed in masked]).to(device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    kept = bits.flatten(1)[:, :vocab_size].bool()
    where = torch.tensor([index for index, _ in masked], device=device)
    changed = logits[where, : kept.shape[1]].masked_fill_(~kept, -torch.inf)
    logits[where] = torch.nn.functional.pad(changed, (0, vocab_size - kept.shape[1]), value=-torch.inf)
