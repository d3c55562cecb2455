"""A ModelRunner without a model: its KV is the tokens themselves, its next token a hash of what it reads.

It reads the context back through the block table, as attention does. So a block that was shared wrongly,
reused too early or registered before it was written changes the output, and a test sees it without torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape

_EMPTY = 2**32 - 1


class SimulatedRunner:
    """Deterministic; `on_step(tokens, pairs)` may advance a virtual clock by what a step would cost."""

    device = "simulated"
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
        """Write every chunk, then read and "sample". Raises RuntimeError when it was told to fail."""
        if self.fails:
            raise RuntimeError("told to fail")
        for chunk in chunks:
            for offset, token in enumerate(chunk.token_ids):
                self._slots[self._slot(chunk, chunk.start + offset)] = token
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self._on_step(tokens, sum(len(c.token_ids) * (c.start + len(c.token_ids)) for c in chunks))
        return [self._sample(chunk) if chunk.sampling is not None else ChunkResult() for chunk in chunks]

    def next_token(self, tokens: ReadOnly[int]) -> int:
        """What follows `tokens` when every block is right: the oracle of tests."""
        digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % min(self.shape.vocab_size, self.POISON)

    def _sample(self, chunk: Chunk) -> ChunkResult:
        if chunk.token_ids[-1] == self.POISON:
            return ChunkResult(failed=True)
        end = chunk.start + len(chunk.token_ids)
        read = [self._slots[self._slot(chunk, position)] for position in range(end)]
        return ChunkResult(tokens=(self.next_token(read),))

    def _slot(self, chunk: Chunk, position: int) -> int:
        return (
            chunk.block_table[position // self._block_size] * self._block_size + position % self._block_size
        )
