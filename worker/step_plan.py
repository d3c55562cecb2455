"""What goes into one step and what comes out of it, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from kvhive.worker.model_runner import Chunk, TokenLogprobs
from kvhive.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of one step: its next `num_tokens` tokens, and room for drafts after them."""

    seq: Sequence
    num_tokens: int
    max_drafts: int = 0

    def chunk(self) -> Chunk:
        """What the model runner must know."""
        seq, sampling = self.seq, self.seq.sampling
        start, end = seq.num_computed, seq.num_computed + self.num_tokens
        last = end == len(seq.tokens)
        wants_prompt = seq.wants_prompt_logprobs and start < seq.prompt_tokens
        return Chunk(
            token_ids=seq.tokens[start:end],
            start=start,
            block_table=seq.block_table,
            sampling=sampling if last else None,
            history=seq.tokens if last else (),
            prompt_tokens=seq.prompt_tokens,
            max_drafts=self.max_drafts,
            prompt_logprobs=sampling.prompt_logprobs if wants_prompt else None,
            next_prompt_token=seq.tokens[end] if wants_prompt and end < seq.prompt_tokens else None,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one sequence: the tokens it gained, none while its prompt is being computed."""

    seq: Sequence
    tokens: ReadOnly[int] = ()
    logprobs: ReadOnly[TokenLogprobs] = ()
    prompt_logprobs: ReadOnly[TokenLogprobs] = ()
