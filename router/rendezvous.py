"""Rendezvous hashing: every key has a home among the workers, the same one on every router.

A worker that leaves or joins moves only its own keys: each key goes to the worker with the highest score, and
scores do not depend on who else is there. 64 bits of score are enough, for nothing but balance hangs on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Seeds = npt.NDArray[np.uint64]

_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Of SplitMix64 (Steele, Lea and Flood, 2014)."""


def worker_seeds(worker_ids: Sequence[str]) -> Seeds:
    """Return what `home_scores` wants to know of each worker; about a microsecond each, so keep it."""
    return np.array([_hash64(worker_id.encode()) for worker_id in worker_ids], np.uint64)


def home_scores(home_key: bytes, seeds: Seeds) -> Seeds:
    """Return each worker's score for a key; the highest is home.

    Without that one, the next highest is.
    """
    mixed = seeds ^ np.uint64(_hash64(home_key))
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _SHIFTS[-1])


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
