"""What goes into one step and what comes out of it, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from kvhive.worker.model_runner import Chunk, TokenLogprobs
from kvhive.worker.sequence import Sequence


@dataclass(slots=True)  # made by the hundred in each step: frozen ones cost thrice
class Scheduled:
    """A sequence's share of one step: its next `num_tokens` tokens, and room for drafts after them."""

    seq: Sequence
    num_tokens: int
    max_drafts: int = 0

    def chunk(self) -> Chunk:
        """What the model runner must know."""
        seq, sampling, tokens = self.seq, self.seq.sampling, self.seq.tokens
        start = seq.num_computed
        end = start + self.num_tokens
        last = end == len(tokens)
        chunk = Chunk(
            tokens[start:end],
            start,
            seq.block_table,
            sampling if last else None,
            tokens if last else (),
            seq.prompt_tokens,
            self.max_drafts,
        )
        if sampling.prompt_logprobs is not None and seq.wants_prompt_logprobs and start < seq.prompt_tokens:
            chunk.prompt_logprobs = sampling.prompt_logprobs
            chunk.next_prompt_token = tokens[end] if end < seq.prompt_tokens else None
        return chunk


@dataclass(slots=True)  # made by the hundred in each step: frozen ones cost thrice
class Progress:
    """What a step did for one sequence: the tokens it gained, none while its prompt is being computed."""

    seq: Sequence
    tokens: ReadOnly[int] = ()
    logprobs: ReadOnly[TokenLogprobs] = ()
    prompt_logprobs: ReadOnly[TokenLogprobs] = ()
