"""A worker's model of its own speed, learnt from the steps it runs.

    seconds(step) = base + per_token * tokens + per_attention * pairs

`tokens` are the tokens a step computes and `pairs` the (computed token, context token) pairs its attention
visits. The three coefficients are a least-squares fit with exponential forgetting, never negative: the
best non-negative fit is one of the 7 fits to a subset of the terms, so all 7 are tried.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

FORGETTING = 0.995
"""Weight of an observation after one more: about 200 steps of memory."""

REFIT_EVERY = 16
"""Observations between two fits; a fit costs about as much as a scheduling decision."""

_SCALE = np.array([1.0, 1e-2, 1e-5])  # keeps the normal equations well conditioned
_SUBSETS = [list(subset) for size in (3, 2, 1) for subset in combinations(range(3), size)]


class StepTimeModel:
    """Learns (base, per_token, per_attention) in seconds."""

    def __init__(self) -> None:
        self._gram: npt.NDArray[np.float64] = np.zeros((3, 3))
        self._moment: npt.NDArray[np.float64] = np.zeros(3)
        self._coefficients = (0.0, 0.0, 0.0)
        self._unfitted = 0
        self._fitted = False

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Learn from one step. Weighted by 1/seconds: 10 % off counts alike in long and short steps."""
        row = np.array([1.0, tokens, pairs]) * _SCALE / seconds
        self._gram = FORGETTING * self._gram + np.outer(row, row)
        self._moment = FORGETTING * self._moment + row
        self._unfitted += 1

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds per step, per token and per attention pair; zeros before the first observation."""
        if self._unfitted >= REFIT_EVERY or (self._unfitted and not self._fitted):
            self._coefficients = self._fit()
            self._unfitted, self._fitted = 0, True
        return self._coefficients

    def _fit(self) -> tuple[float, float, float]:
        best, best_error = np.zeros(3), 0.0
        for subset in _SUBSETS:
            gram, moment = self._gram[np.ix_(subset, subset)], self._moment[subset]
            solution = np.linalg.lstsq(gram, moment, rcond=1e-9)[0]
            error = float(solution @ gram @ solution - 2 * solution @ moment)
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[subset] = solution
        base, per_token, per_attention = (float(value) for value in best * _SCALE)
        return base, per_token, per_attention
