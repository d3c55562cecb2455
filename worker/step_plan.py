"""What a running sequence computes in a step."""

from __future__ import annotations

from kvhive.worker.model_runner import Chunk
from kvhive.worker.sequence import Sequence


class Scheduled:
    """A running sequence and its share of the step: its next `num_tokens` tokens, as `chunk` has them.

    Made when the sequence is admitted and used in every step until it stops running: of a sequence that
    decodes only the token and its position change.
    """

    __slots__ = ("chunk", "num_tokens", "seq")

    def __init__(self, seq: Sequence, num_tokens: int) -> None:
        """Plan the first `num_tokens` tokens that `seq` has to compute."""
        self.seq = seq
        self.num_tokens = num_tokens
        self.chunk = self._new_chunk()

    def plan(self, num_tokens: int) -> None:
        """Plan the next `num_tokens` tokens, and no drafts. What was planned before has been computed."""
        self.num_tokens = num_tokens
        chunk, seq = self.chunk, self.seq
        if chunk.sampling is None or chunk.prompt_logprobs is not None:
            self.chunk = self._new_chunk()
        else:  # it had come to the sequence's end, and so does this one
            chunk.start = seq.num_computed
            chunk.token_ids = seq.tokens[-1:]
            chunk.max_drafts = 0

    def _new_chunk(self) -> Chunk:
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
            matcher=seq.matcher if last else None,
        )
        if seq.wants_prompt_logprobs and start < seq.prompt_tokens:
            chunk.prompt_logprobs = sampling.prompt_logprobs
            chunk.next_prompt_token = tokens[end] if end < seq.prompt_tokens else None
        return chunk
