"""A ModelRunner without a model: its KV is the tokens themselves, its next token a hash of what it reads.

It reads the context back through the block table, as attention does. So a block that was shared wrongly,
reused too early or registered before it was written changes the output, and a test sees it without torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape, TokenLogprobs
from kvhive.worker.sequence import SamplingParams

_EMPTY = 2**32 - 1


class SimulatedRunner:
    """Deterministic; `on_step(tokens, pairs)` may advance a virtual clock by what a step would cost.

    Of the sampling options it knows choice (each choice is its own stream, whatever the temperature),
    min_tokens and the log-probabilities.
    """

    device = "simulated"
    overlaps = False
    POISON = 999
    """A token after which the logits are not finite."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        max_context: int = 8192,
        on_step: Callable[[int, int], None] = lambda tokens, pairs: None,
    ) -> None:
        self._slots = array("I", [_EMPTY]) * (num_blocks * block_size)
        self._block_size = block_size
        self._on_step = on_step
        self.fails = False
        """Set to make the next step fail as a whole."""
        self.shape = ModelShape(vocab_size, max_context, 1, 1, 1, 4)

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Write every chunk and its drafts, then read and "sample".

        Raises RuntimeError when it was told to fail.
        """
        if self.fails:
            raise RuntimeError("told to fail")
        tokens = pairs = 0
        for chunk in chunks:
            written = [*chunk.token_ids, *chunk.drafts]
            for position, token in enumerate(written, chunk.start):
                self._slots[self._slot(chunk, position)] = token
            tokens += len(written)
            pairs += len(written) * (chunk.start + len(written))
        self._on_step(tokens, pairs)
        return [self._answer(chunk) for chunk in chunks]

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Put all of the step off to its end."""
        return lambda: self.run(chunks)

    def next_token(
        self, tokens: ReadOnly[int], sampling: SamplingParams | None = None, prompt_tokens: int = 0
    ) -> int:
        """Return what follows `tokens` when every block is right: the oracle of tests.

        prompt_tokens: how many of `tokens` are the prompt; the rest counts towards min_tokens
        """
        choice = sampling.choice if sampling else 0
        # Choice 0 hashes the tokens alone: what the model finds likeliest.
        hashed = array("I", [*tokens, _EMPTY, choice] if choice else tokens)
        digest = hashlib.blake2b(hashed.tobytes(), digest_size=8).digest()
        range_ = min(self.shape.vocab_size, self.POISON)
        token = int.from_bytes(digest, "little") % range_
        if sampling and len(tokens) - prompt_tokens < sampling.min_tokens:
            for _ in range(range_):
                if token not in sampling.stop_token_ids:
                    break
                token = (token + 1) % range_
        return token

    def logprobs(self, tokens: ReadOnly[int], token: int, top: int) -> TokenLogprobs:
        """Return what `token` after `tokens` is given, with `top` alternatives: made up, but a function."""
        best, vocab = self.next_token(tokens), self.shape.vocab_size

        def logprob(other: int) -> float:
            return -0.5 - (other - best) % vocab / 4

        likeliest = [(best + i) % vocab for i in range(min(top, vocab))]
        return TokenLogprobs(logprob(token), tuple((other, logprob(other)) for other in likeliest))

    def _answer(self, chunk: Chunk) -> ChunkResult:
        needed = chunk.token_ids[-1:] if chunk.sampling else ()
        if self.POISON in (needed if chunk.prompt_logprobs is None else chunk.token_ids):
            return ChunkResult(failed=True)
        end = chunk.start + len(chunk.token_ids) + len(chunk.drafts)
        read = [self._slots[self._slot(chunk, position)] for position in range(end)]
        prompt_logprobs = self._prompt_logprobs(chunk, read)
        if chunk.sampling is None:
            return ChunkResult(prompt_logprobs=prompt_logprobs)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for seen in range(end - len(chunk.drafts), end + 1):
            token = self.next_token(read[:seen], chunk.sampling, chunk.prompt_tokens)
            tokens.append(token)
            if chunk.sampling.logprobs is not None:
                logprobs.append(self.logprobs(read[:seen], token, chunk.sampling.logprobs))
            if seen == end or token != read[seen]:
                break
        return ChunkResult(tuple(tokens), tuple(logprobs), prompt_logprobs, drafted=len(chunk.drafts))

    def _prompt_logprobs(self, chunk: Chunk, read: list[int]) -> tuple[TokenLogprobs, ...]:
        top = chunk.prompt_logprobs
        if top is None:
            return ()
        following = list(chunk.token_ids[1:])
        if chunk.next_prompt_token is not None:
            following.append(chunk.next_prompt_token)
        return tuple(
            self.logprobs(read[:seen], token, top) for seen, token in enumerate(following, chunk.start + 1)
        )

    def _slot(self, chunk: Chunk, position: int) -> int:
        return (
            chunk.block_table[position // self._block_size] * self._block_size + position % self._block_size
        )
