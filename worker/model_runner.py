"""The seam between scheduling and computing: what one step asks for and what it answers.

Implementations: `TorchModelRunner` (torch_runner.py) computes; `SimulatedRunner` (simulated_runner.py)
pretends, on a cost model. Scheduler, pool and engine know only this file, and import no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import Protocol

from kvhive.worker.sequence import SamplingParams

NO_TOKEN = -1
"""Sampled where the model's logits are not finite: the sequence has failed, and only that one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one sequence that a step computes: tokens[start : start + len(token_ids)]."""

    token_ids: ReadOnly[int]
    start: int
    """Position of the first of `token_ids`; the KV of all positions before it is in the pool."""
    block_table: ReadOnly[int]
    """Block ids that cover positions 0 .. start + len(token_ids) - 1."""
    sampling: SamplingParams | None
    """Set when this chunk reaches the end of the sequence, so that the step samples its next token."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a model to size a pool and to refuse a request."""

    vocab_size: int
    max_context: int
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int
    """Of K and V in the pool."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of all layers of one block."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element * block_size


class ModelRunner(Protocol):
    """Writes the KV of each chunk into the pool and samples where asked.

    `run` is called from one thread, one step at a time. It returns one entry per chunk, in order: the
    sampled token id (or NO_TOKEN), and None where `sampling` is None. When it returns, the KV of every chunk
    is written. Whatever it raises ends the engine: the pool's content is not known any more.
    """

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        ...

    @property
    def device(self) -> str:
        """Name of the device for people, such as `cpu` or `cuda:0 NVIDIA H200`."""
        ...

    def run(self, chunks: ReadOnly[Chunk]) -> list[int | None]:
        """Compute one step."""
        ...
