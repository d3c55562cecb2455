"""Drafts by a smaller model, whose KV pool is addressed by the target's own block ids.

So prefix sharing, preemption and eviction need no second bookkeeping. All that is kept is, per block, how
many of its leading positions the draft's pool really holds: the target's writes lower it, the draft's raise
it. Before it drafts, the model computes whatever is missing, be that a prompt, the last of a run of accepted
drafts, or blocks that came from elsewhere; a sequence for which nobody wants drafts costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace

import numpy as np

from kvhive.proto.errors import ModelError
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelRunner, ModelShape
from kvhive.worker.output_matcher import OutputMatcher
from kvhive.worker.sequence import SamplingParams

SHORT_LAG = 32
"""Missing tokens up to which a sequence drafts in the same step. Beyond it catches up first, so that what
drafting costs can be measured apart."""


class DraftModel:
    """Implements Drafter. Samples with the options, seed, choice and position that the target will use.

    Both add the same noise to their logits and take the largest (Gumbel coupling), so they agree far more
    often than two independent draws: always, where the models do.
    """

    def __init__(
        self,
        runner: ModelRunner,
        target: ModelShape,
        num_blocks: int,
        block_size: int,
        catch_up_tokens: int,
    ) -> None:
        """Draft with `runner`, whose pool has the target's number and size of blocks.

        catch_up_tokens: most missing tokens that one step computes, over all sequences

        Raises ModelError when the vocabularies differ in size.
        """
        if runner.shape.vocab_size != target.vocab_size:
            raise ModelError(
                f"the draft model has a vocabulary of {runner.shape.vocab_size} tokens, "
                f"the model one of {target.vocab_size}"
            )
        self._runner = runner
        self._block_size = block_size
        self._catch_up_tokens = catch_up_tokens
        self._held = np.zeros(num_blocks, np.int32)
        """Leading positions of each block whose KV, here, is that of the tokens the target has there."""

    def propose(self, chunks: ReadOnly[Chunk]) -> list[list[int]]:
        """Return the drafts of each chunk; see Drafter."""
        for chunk in chunks:
            drafts = max(chunk.max_drafts, len(chunk.drafts))
            self._release(chunk.block_table, chunk.start, chunk.start + len(chunk.token_ids) + drafts)
        proposals: list[list[int]] = [[] for _ in chunks]
        drafting, lagging = self._sort(chunks, proposals)
        if lagging:
            self._runner.run(lagging)
            for chunk in lagging:
                self._hold(chunk)
        while drafting:
            asked = [guess.chunk() for guess in drafting]
            results = self._runner.run(asked)
            for chunk in asked:
                self._hold(chunk)
            drafting = [guess for guess, result in zip(drafting, results, strict=True) if guess.take(result)]
        return proposals

    def _sort(
        self, chunks: ReadOnly[Chunk], proposals: ReadOnly[list[int]]
    ) -> tuple[list[_Guess], list[Chunk]]:
        """Return who drafts now, and what is computed for those who miss too much to do so."""
        drafting: list[_Guess] = []
        lagging: list[Chunk] = []
        budget = self._catch_up_tokens
        claimed: set[int] = set()
        for chunk, drafts in zip(chunks, proposals, strict=True):
            end = chunk.start + len(chunk.token_ids)
            limit = min(chunk.max_drafts, self._runner.shape.max_context - end)
            if limit <= 0 or chunk.sampling is None:
                continue
            begin = self._first_missing(chunk, end)
            missing = end - begin
            size = missing if missing <= SHORT_LAG else min(missing, budget)
            written = chunk.block_table[begin // self._block_size : -(-(begin + size) // self._block_size)]
            if not size or not claimed.isdisjoint(written):
                continue  # another sequence computes the prefix they share; next step it is there
            claimed.update(written)
            if missing <= SHORT_LAG:
                sampling = replace(chunk.sampling, logprobs=None, prompt_logprobs=None)
                history = list(chunk.history)
                matcher = chunk.matcher.fork() if chunk.matcher is not None else None
                drafting.append(_Guess(chunk, sampling, limit, history, begin, drafts, matcher))
            else:
                budget -= size
                tokens = chunk.history[begin : begin + size]
                lagging.append(Chunk(tokens, begin, chunk.block_table, sampling=None))
        return drafting, lagging

    def _first_missing(self, chunk: Chunk, end: int) -> int:
        held = self._held[np.asarray(chunk.block_table[: -(-end // self._block_size)])]
        index = int((held < self._block_size).argmax())  # there is one: where the chunk itself begins
        return index * self._block_size + int(held[index])

    def _release(self, table: ReadOnly[int], start: int, end: int) -> None:
        """Forget what is held from `start` on in the blocks that the target now writes, or may write."""
        first, offset = divmod(start, self._block_size)
        blocks = np.asarray(table[first : -(-end // self._block_size)])
        self._held[blocks[0]] = min(self._held[blocks[0]], offset)
        self._held[blocks[1:]] = 0

    def _hold(self, chunk: Chunk) -> None:
        first, last = chunk.start // self._block_size, chunk.start + len(chunk.token_ids)
        blocks = np.asarray(chunk.block_table[first : -(-last // self._block_size)])
        ends = last - (first + np.arange(len(blocks))) * self._block_size
        self._held[blocks] = np.minimum(ends, self._block_size)


@dataclass(slots=True)
class _Guess:
    """One sequence while it drafts."""

    asked: Chunk
    sampling: SamplingParams
    limit: int
    history: list[int]
    """Its tokens, then its drafts."""
    begin: int
    """First position that the draft's pool lacks."""
    drafts: list[int] = field(default_factory=list)
    matcher: OutputMatcher | None = None
    """Where its drafts are in the grammar; the target's own stays behind."""

    def chunk(self) -> Chunk:
        """Return what the draft model computes next."""
        return Chunk(
            token_ids=self.history[self.begin :],
            start=self.begin,
            block_table=self.asked.block_table,
            sampling=self.sampling,
            history=self.history,
            prompt_tokens=self.asked.prompt_tokens,
            matcher=self.matcher,
        )

    def take(self, result: ChunkResult) -> bool:
        """Take in a draft; False when there is no use in another."""
        if not result.tokens:  # its logits were not finite, which is no concern of the target
            return False
        (token,) = result.tokens
        self.begin = len(self.history)
        self.history.append(token)
        self.drafts.append(token)
        ended = token in self.sampling.stop_token_ids or result.ends_at > 0
        return len(self.drafts) < self.limit and not ended
