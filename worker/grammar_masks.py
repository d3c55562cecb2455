"""What grammars allow in a step, computed while the model computes the step's logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from kvhive.worker.model_runner import Chunk
from kvhive.worker.output_matcher import Mask, MaskFiller, OutputMatcher
from kvhive.worker.sequence import SamplingParams

Masks = dict[int, list[Mask]]
"""By the place of a chunk that has a grammar: what may follow it, and each of its drafts."""


class GrammarMasks:
    """The masks of one runner's steps. Steps without a grammar cost a look at each chunk."""

    def __init__(self) -> None:
        self._filler = MaskFiller()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, chunks: ReadOnly[Chunk]) -> Callable[[], Masks]:
        """Begin with a step's masks, and return what waits for them."""
        asked: dict[int, tuple[OutputMatcher, ReadOnly[int]]] = {
            place: (chunk.matcher, chunk.drafts)
            for place, chunk in enumerate(chunks)
            if chunk.matcher is not None and chunk.sampling is not None
        }
        if not asked:
            return dict
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar masks")
        filling = self._thread.submit(self._filler.fill, list(asked.values()))
        return lambda: dict(zip(asked, filling.result(), strict=True))


def allowed(mask: Mask, params: SamplingParams, ends: frozenset[int], early: bool) -> torch.Tensor:
    """Return which tokens may be sampled: [words] int32, as PenaltyRow has it.

    The grammar goes first. Of what it allows, stop tokens that come too `early` are left out, and ends that
    the caller does not count; unless nothing else may follow.
    """
    unwanted = ends - params.stop_token_ids
    if early:
        unwanted |= params.stop_token_ids
    wanted = mask.view(np.uint32).copy()
    for token in unwanted:
        if token >> 5 < wanted.shape[0]:
            wanted[token >> 5] &= ~np.uint32(1 << (token & 31))
    return torch.from_numpy(wanted.view(np.int32) if wanted.any() else mask)
