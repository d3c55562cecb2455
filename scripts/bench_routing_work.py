"""The work that routers are measured on, as plain numbers, so that every side can put it into its own terms.

An index is made of chains. A chain's block is named by chain and position; some worker holds all of the
chain, and every third one a leading part of it, too. A prompt is the beginning of a chain, up to a random
block, and then blocks that nobody has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

BLOCKS_PER_EVENT = 16
PROMPTS = 200


@dataclass(frozen=True, slots=True)
class IndexWork:
    """An index of about `blocks` (worker, block) pairs over `workers`, and prompts of `prompt_blocks`."""

    blocks: int
    workers: int
    prompt_blocks: int
    seed: int = 1

    @property
    def chain_blocks(self) -> int:
        """Blocks of each chain: enough for the prompts, and a usual conversation at least."""
        return max(512, self.prompt_blocks)

    def holdings(self) -> Iterator[tuple[int, int, int]]:
        """Yield (chain, worker, leading blocks that it holds)."""
        rng, left, chain = random.Random(self.seed), self.blocks, 0
        while left > 0:
            whole = min(self.chain_blocks, left)
            first = rng.randrange(self.workers)
            yield chain, first, whole
            left -= whole
            part = min(rng.randrange(1, self.chain_blocks + 1), left) if chain % 3 == 0 else 0
            if part and self.workers > 1:
                yield chain, (first + rng.randrange(1, self.workers)) % self.workers, part
                left -= part
            chain += 1

    def prompts(self) -> list[tuple[int, int]]:
        """Return (chain, leading blocks of it) for each prompt; what follows is new."""
        chains = sorted({chain for chain, _, length in self.holdings() if length == self.chain_blocks})
        rng = random.Random(self.seed + 1)
        return [(rng.choice(chains), rng.randrange(self.prompt_blocks + 1)) for _ in range(PROMPTS)]

    def expected(self) -> list[dict[int, int]]:
        """Return worker -> matched blocks for each prompt."""
        held: dict[int, list[tuple[int, int]]] = {}
        for chain, worker, length in self.holdings():
            held.setdefault(chain, []).append((worker, length))
        return [
            {worker: min(length, known) for worker, length in held[chain] if known}
            for chain, known in self.prompts()
        ]


def key_number(chain: int, position: int) -> int:
    """The name of a block: 63 bits that are spread as a hash's are."""
    mixed = (chain * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed ^ (mixed >> 29)) & (2**63 - 1)


def new_number(prompt: int, position: int) -> int:
    """The name of a prompt's block that nobody has."""
    return key_number((1 << 40) + prompt, position)


def prompt_tokens(count: int, prompt: int) -> list[int]:
    """Token ids of a prompt that nobody has computed."""
    rng = random.Random(prompt * 1_000_003 + count)
    return [rng.randrange(49_152) for _ in range(count)]
