"""Sequences driven through a model runner by hand, with room for drafts, and drafters that play a part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace

from kvhive.worker.model_runner import Chunk, ModelRunner
from kvhive.worker.sequence import SamplingParams

BLOCK_SIZE = 4


@dataclass
class Generation:
    """One request on its way."""

    history: list[int]
    sampling: SamplingParams
    prompt_tokens: int = 0
    table: list[int] = field(default_factory=list)
    computed: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.history)
        self.goal = self.prompt_tokens + self.sampling.max_tokens

    @property
    def output(self) -> list[int]:
        return self.history[self.prompt_tokens :]

    @property
    def done(self) -> bool:
        return self.failed or len(self.history) >= self.goal

    def follow_up(self, question: Iterable[int], max_tokens: int, block_size: int = BLOCK_SIZE) -> Generation:
        """The next turn: its full computed blocks are found in the cache, the rest is computed again."""
        full = self.computed // block_size
        sampling = replace(self.sampling, max_tokens=max_tokens)
        turn = Generation([*self.history, *question], sampling, table=self.table[:full])
        turn.computed = full * block_size
        return turn


class Bench:
    """Runs generations together, each with up to `max_drafts` drafts a step, prompts in chunks."""

    def __init__(
        self, runner: ModelRunner, max_drafts: int = 0, block_size: int = BLOCK_SIZE, chunk: int = 7
    ) -> None:
        self.runner = runner
        self.max_drafts = max_drafts
        self.block_size = block_size
        self.chunk = chunk
        self.drafted = 0
        self.accepted = 0
        self._fresh = itertools.count()

    def run(self, generations: Iterable[Generation]) -> list[list[int]]:
        """Bring all to their end; return their outputs."""
        generations = list(generations)
        while active := [generation for generation in generations if not generation.done]:
            chunks = [self._next(generation) for generation in active]
            for generation, chunk, result in zip(active, chunks, self.runner.run(chunks), strict=True):
                generation.steps += 1
                generation.failed = result.failed
                accepted = max(0, len(result.tokens) - 1)
                generation.drafted += result.drafted
                generation.accepted += accepted
                self.drafted += result.drafted
                self.accepted += accepted
                generation.history.extend(result.tokens)
                generation.computed += len(chunk.token_ids) + accepted
        assert all(
            generation.failed or len(generation.history) == generation.goal for generation in generations
        )
        return [generation.output for generation in generations]

    def _next(self, generation: Generation) -> Chunk:
        start = generation.computed
        end = min(len(generation.history), start + self.chunk)
        last = end == len(generation.history)
        room = generation.goal - len(generation.history) - 1
        drafts = min(self.max_drafts, room) if last and end - start == 1 else 0
        while len(generation.table) * self.block_size < end + drafts:
            generation.table.append(next(self._fresh))
        return Chunk(
            token_ids=generation.history[start:end],
            start=start,
            block_table=generation.table,
            sampling=generation.sampling if last else None,
            history=generation.history if last else (),
            prompt_tokens=generation.prompt_tokens,
            max_drafts=drafts,
        )


class ScriptedDrafter:
    """Knows what follows, and says so or not: `right(sequence length, i)` decides over each draft."""

    def __init__(
        self,
        next_token: Callable[[ReadOnly[int], SamplingParams], int],
        right: Callable[[int, int], bool],
        on_propose: Callable[[int], None] = lambda longest: None,
    ) -> None:
        self._next_token = next_token
        self._right = right
        self._on_propose = on_propose

    def propose(self, chunks: ReadOnly[Chunk]) -> list[list[int]]:
        proposals = [self._propose(chunk) for chunk in chunks]
        self._on_propose(max(map(len, proposals), default=0))
        return proposals

    def _propose(self, chunk: Chunk) -> list[int]:
        tokens = list(chunk.history)
        for index in range(chunk.max_drafts):
            assert chunk.sampling is not None
            token = self._next_token(tokens, chunk.sampling)
            tokens.append(token if self._right(len(chunk.history), index) else (token + 1) % 900)
        return tokens[len(chunk.history) :]
