"""Who guesses what follows: the seam between speculation and its sources of drafts.

Implementations: `NgramDrafter` (ngram_drafter.py) looks back in the sequence; `DraftModel` (draft_model.py)
asks a smaller model.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from typing import Protocol

from kvhive.worker.model_runner import Chunk


class Drafter(Protocol):
    """Proposes the tokens after each chunk of a step, before the target model runs that step.

    `propose` is called from the engine's thread with every chunk of every step, also those that want no
    drafts: the target is about to write their positions. It returns one list per chunk, in order, of at most
    `chunk.max_drafts` tokens of the target's vocabulary; an empty list where it has no idea. It may write
    the positions that the chunk's block table covers in a pool of its own, never in the target's.

    Drafts are advice: wrong ones cost time, and nothing else.
    """

    def propose(self, chunks: ReadOnly[Chunk]) -> list[list[int]]:
        """Return the drafts of each chunk."""
        ...
