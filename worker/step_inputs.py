"""A step's batch, written into one host buffer and brought to the device in one copy.

    int64: tokens [T], positions [T], slots [T], logit rows [S]
    int32: query starts [B + 1], context lengths [B], block tables [B, W]

On the CPU the buffer is the batch. On CUDA it is pinned, and the copy waits for nothing; the next step is
written only when this one has ended, so the copy is over by then.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvhive.kernels.attention_metadata import AttentionMetadata
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.model_runner import Chunk

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large each part of a batch is; a CUDA graph has one for good, and pads what is smaller."""

    tokens: int
    logit_rows: int
    sequences: int
    table_width: int

    @property
    def wide(self) -> int:
        """int64 words."""
        return 3 * self.tokens + self.logit_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return 8 * self.wide + 4 * (self.sequences * (2 + self.table_width) + 1)


class StepInputs:
    """Lays out batches for one pool. A batch is good until the next one is laid out."""

    def __init__(self, pool: torch.Tensor, windows: tuple[int | None, ...], spare_block: int = 0) -> None:
        """Lay out for a pool [blocks, layers, 2, kv_heads, block_size, head_dim].

        spare_block: where padding writes
        """
        self._pool_blocks, self._block_size, self._device = pool.shape[0], pool.shape[4], pool.device
        self._windows = windows
        self._spare_block = spare_block
        self._host = torch.empty(0, dtype=torch.uint8)
        self._own = self._host

    def lay_out(
        self, chunks: ReadOnly[Chunk], logit_rows: ReadOnly[int], shape: StepShape | None = None
    ) -> ForwardBatch:
        """Lay the chunks, each with its drafts, end to end.

        logit_rows: the tokens of the step whose successor is asked for
        shape: what the batch is padded to, with sequences of one token that nobody reads; None: no padding

        Raises ValueError when a chunk's blocks are missing or outside the pool.
        """
        lengths = np.array([len(chunk.token_ids) + len(chunk.drafts) for chunk in chunks], dtype=np.int64)
        tokens = int(lengths.sum())
        needed = -(-(np.array([c.start for c in chunks], np.int64) + lengths) // self._block_size)
        shape = shape or StepShape(tokens, len(logit_rows), len(chunks), int(needed.max()))
        own, count, padding = len(chunks), shape.sequences, shape.tokens - tokens
        wide, narrow = self._parts(shape)
        tables = narrow[2 * count + 1 :].reshape(count, shape.table_width)
        self._fill_tables(tables, chunks, needed)
        ids, positions, slots = wide[: 3 * shape.tokens].reshape(3, shape.tokens)
        starts, contexts = narrow[: count + 1], narrow[count + 1 : 2 * count + 1]
        lengths = np.concatenate((lengths, np.ones(padding, np.int64)))
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        contexts[:own] = [chunk.start for chunk in chunks]
        contexts[own:] = 0
        sequence_of = np.repeat(np.arange(count), lengths)
        positions[:] = np.arange(shape.tokens) + (contexts - starts[:-1])[sequence_of]
        contexts += lengths.astype(np.int32)
        written = (token for chunk in chunks for token in (*chunk.token_ids, *chunk.drafts))
        ids[:tokens] = np.fromiter(written, np.int64, tokens)
        ids[tokens:] = 0
        places = tables[sequence_of, positions // self._block_size].astype(np.int64)
        slots[:] = places * self._block_size + positions % self._block_size
        rows = wide[3 * shape.tokens :]
        rows[: len(logit_rows)] = logit_rows
        rows[len(logit_rows) :] = 0
        return self._on_device(shape, lengths.tolist(), contexts.tolist())

    def laid_out(self, shape: StepShape) -> torch.Tensor:
        """Return the bytes of the batch of this shape that was just laid out, on the host."""
        return self._host[: shape.nbytes]

    def room(self, shape: StepShape) -> torch.Tensor:
        """Return the host's bytes for a batch of this shape, for somebody to copy one into."""
        self._parts(shape)
        return self._host[: shape.nbytes]

    def laid_out_elsewhere(self, shape: StepShape) -> ForwardBatch:
        """Return the batch that was copied into `room`; it was checked where it was laid out."""
        _, narrow = self._parts(shape)
        starts, contexts = (
            narrow[: shape.sequences + 1],
            narrow[shape.sequences + 1 : 2 * shape.sequences + 1],
        )
        return self._on_device(shape, np.diff(starts).tolist(), contexts.tolist())

    def _parts(self, shape: StepShape) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the host buffer's int64 and int32 words, with room for the shape."""
        if self._host.numel() < shape.nbytes:
            cuda = self._device.type == "cuda"
            nbytes = -(-2 * shape.nbytes // _PAGE) * _PAGE
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
            self._own = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if cuda else self._host
        words = self._host.numpy()[: shape.nbytes]
        return words[: 8 * shape.wide].view(np.int64), words[8 * shape.wide :].view(np.int32)

    def _fill_tables(
        self, tables: npt.NDArray[np.int32], chunks: ReadOnly[Chunk], needed: npt.NDArray[np.int64]
    ) -> None:
        for row, chunk, count in zip(tables, chunks, needed.tolist(), strict=False):
            own = chunk.block_table[:count]
            if len(own) < count:
                raise ValueError(f"a chunk at {chunk.start} needs {count} blocks, has {list(own)}")
            row[:count] = own
            row[count:] = own[0]
        tables[len(chunks) :] = self._spare_block
        if tables.min() < 0 or tables.max() >= self._pool_blocks:
            raise ValueError(
                f"a block table leaves a pool of {self._pool_blocks}: has {tables.min()} to {tables.max()}"
            )

    def _on_device(self, shape: StepShape, lengths: list[int], contexts: list[int]) -> ForwardBatch:
        if self._own is not self._host:
            self._own[: shape.nbytes].copy_(self._host[: shape.nbytes], non_blocking=True)
        wide = self._own[: 8 * shape.wide].view(torch.int64)
        narrow = self._own[8 * shape.wide : shape.nbytes].view(torch.int32)
        ids, positions, slots, rows = wide.split((shape.tokens, shape.tokens, shape.tokens, shape.logit_rows))
        query_starts, context_lengths, block_tables = narrow.split(
            (shape.sequences + 1, shape.sequences, shape.sequences * shape.table_width)
        )
        attention = AttentionMetadata(
            block_tables=block_tables.view(shape.sequences, shape.table_width),
            query_starts=query_starts,
            context_lengths=context_lengths,
            query_lengths=lengths,
            contexts=contexts,
            tokens=shape.tokens,
            pool_blocks=self._pool_blocks,
            block_size=self._block_size,
            windows=self._windows,
        )
        return ForwardBatch(ids, positions, slots, attention, rows)
