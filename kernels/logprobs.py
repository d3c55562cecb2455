"""Log-probabilities of the model's own distribution, and its likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST_LOGPROB = -9999.0
"""What is reported for a token that the model rules out, whose log-probability is -Inf."""

_SLICE = 1 << 22
"""Logits looked at together: 16 MiB of float32, whatever the number of rows."""

RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The token's log-probability; (token id, log-probability) of the likeliest, best first."""


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[RowLogprobs | None]:
    """Return log softmax(row)[token] and the `top` likeliest tokens, for each row.

    logits: [len(tokens), vocab_size], any float dtype; the sums are float32 or wider

    Equally likely tokens go by the lower id; tokens the model rules out are no alternatives. None for a row
    that is not finite: NaN, +Inf or nothing but -Inf. Memory beyond `logits` does not grow with the rows.
    Natural logarithms, never below LEAST_LOGPROB.

    Raises ValueError when shapes do not fit.
    """
    if logits.dim() != 2 or logits.shape[0] != len(tokens):
        raise ValueError(f"logits: needs [{len(tokens)}, vocab_size], is {tuple(logits.shape)}")
    size = max(1, _SLICE // logits.shape[1])
    result: list[RowLogprobs | None] = []
    for start in range(0, len(tokens), size):
        result += _slice_logprobs(logits[start : start + size], tokens[start : start + size], top)
    return result


def _slice_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[RowLogprobs | None]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    totals = torch.logsumexp(wide, dim=-1, keepdim=True)
    own = wide.gather(1, torch.tensor(tokens, device=wide.device)[:, None]) - totals
    count = min(top, wide.shape[1])
    # One more than asked: where it ties with the last one, topk may have chosen the wrong of the two.
    best = wide.topk(min(count + 1, wide.shape[1]) if count else 0, dim=-1)
    finite: list[bool] = torch.isfinite(totals[:, 0]).tolist()
    own_values: list[float] = own[:, 0].clamp(min=LEAST_LOGPROB).tolist()
    values: list[list[float]] = (best.values - totals).clamp(min=LEAST_LOGPROB).tolist()
    best_logits: list[list[float]] = best.values.tolist()
    ids: list[list[int]] = best.indices.tolist()
    result: list[RowLogprobs | None] = []
    for i in range(len(tokens)):
        row = list(zip(ids[i], best_logits[i], values[i], strict=True))
        if count and len(row) > count and best_logits[i][count - 1] == best_logits[i][count]:
            row = _with_all_that_tie(wide[i], float(totals[i, 0]), best_logits[i][count])
        row = sorted(row, key=lambda entry: (-entry[1], entry[0]))[:count]
        likeliest = tuple((token, value) for token, logit, value in row if logit > -torch.inf)
        result.append((own_values[i], likeliest) if finite[i] else None)
    return result


def _with_all_that_tie(logits: torch.Tensor, total: float, least: float) -> list[tuple[int, float, float]]:
    """(token, logit, log-probability) of every token of one row whose logit is at least `least`."""
    tokens = torch.nonzero(logits >= least)[:, 0]
    kept = logits[tokens]
    values: list[float] = (kept - total).clamp(min=LEAST_LOGPROB).tolist()
    return list(zip(tokens.tolist(), kept.tolist(), values, strict=True))
