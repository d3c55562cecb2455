"""When a refused client is to come again: by the prediction, within bounds, and not all at once."""

from __future__ import annotations

LEAST_S = 0.5
"""Sooner, an estimate means nothing, and refusing costs as much as answering."""
MOST_S = 60.0
"""OpenAI's clients take a longer one for a mistake, and come back after half a second."""
SPREAD = 0.5
"""Those who were refused together come back over half as long again as they wait."""


def retry_after_s(expected_s: float, chance: float) -> float:
    """Return what to tell a client whose request is expected to find a place in `expected_s` seconds.

    chance: a random number between 0 and 1
    """
    return min(MOST_S, max(LEAST_S, expected_s) * (1.0 + SPREAD * chance))
