"""CUDA graphs of decoding: a step of one token a sequence becomes one launch instead of hundreds.

A graph computes one padded batch size, over buffers that stay where they are. What pads writes into a spare
block that no sequence is ever given.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace

import torch

from kvhive.worker.forward_batch import ForwardBatch, LanguageModel
from kvhive.worker.model_runner import Chunk
from kvhive.worker.step_inputs import StepInputs, StepShape

log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batches are padded to the next of these: at most half is waste, and above 32 at most a third."""


def is_plain_decode(chunk: Chunk) -> bool:
    """Whether a chunk is one token whose successor is sampled, and nothing else."""
    return (
        len(chunk.token_ids) == 1
        and not chunk.drafts
        and chunk.sampling is not None
        and chunk.prompt_logprobs is None
    )


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes to capture for so many sequences; a larger batch runs without a graph."""
    largest = min(max_running, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    shape: StepShape
    batch: ForwardBatch
    """What was recorded; it keeps the tensors alive that the launches read."""
    logits: torch.Tensor
    """[size, vocab_size], overwritten by the next replay."""


class DecodeGraphs:
    """The graphs of one model over one pool, captured once, largest first so that all share its memory."""

    def __init__(
        self,
        model: LanguageModel,
        pool: torch.Tensor,
        windows: tuple[int | None, ...],
        sizes: ReadOnly[int],
        max_context: int,
    ) -> None:
        """Capture. pool's last block is the spare one; it is a CUDA tensor."""
        self._model, self._pool, self._windows = model, pool, windows
        self._width = -(-max_context // pool.shape[4])
        self._max_context = max_context
        self._sizes = sorted(sizes)
        self._memory: tuple[int, int] | None = None
        self._graphs: dict[int, _Graph] = {}
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)
        log.info("captured decode graphs for batches of %s", ", ".join(map(str, self._sizes)))

    def logits(self, chunks: ReadOnly[Chunk]) -> torch.Tensor | None:
        """Replay a step of plain decodes: [len(chunks), vocab_size]; None when no graph is large enough.

        The result is good until the next replay.
        """
        place = bisect_left(self._sizes, len(chunks))
        if place == len(self._sizes):
            return None
        captured = self._graphs[self._sizes[place]]
        captured.inputs.lay_out(chunks, range(len(chunks)), captured.shape)
        captured.graph.replay()
        return captured.logits[: len(chunks)]

    def _capture(self, size: int) -> _Graph:
        spare = self._pool.shape[0] - 1
        inputs = StepInputs(self._pool, self._windows, spare)
        shape = StepShape(size, size, size, self._width)
        batch = self._longest(inputs.lay_out([], [], shape))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and allocate before anything is recorded
            for _ in range(2):
                self._model.forward(batch, self._pool)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._model.forward(batch, self._pool)
        self._memory = self._memory or graph.pool()
        return _Graph(graph, inputs, shape, batch, logits)

    def _longest(self, batch: ForwardBatch) -> ForwardBatch:
        """Claim the longest contexts: the launches of a graph are fixed, and must do for any."""
        contexts = [self._max_context] * len(batch.attention.contexts)
        return replace(batch, attention=replace(batch.attention, contexts=contexts))
