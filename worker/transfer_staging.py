"""How blocks get out of a pool into messages, and out of messages into a pool.

A block of all layers is one contiguous piece of memory. On a CPU, where it is large enough to be a message of
its own, it goes straight from pool to pool: copying it twice more would halve the speed. Small blocks, and
those on a GPU, are gathered side by side into a staging buffer, travel as one message and are scattered.

All of it happens on the transfer's own thread and, on a GPU, on a stream of its own. That is safe beside a
running step: what is sent is registered, so nobody writes to it, and what is received has no hash yet, so
nobody reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from kvhive.kernels.block_copy import gather_blocks, scatter_blocks

DIRECT_BYTES = 128 * 1024
"""From this size on a block is worth a message. Smaller messages cost more than a copy does."""

SLOTS = 2
"""Staging buffers: one is filled or emptied while the other one is on its way."""


class Staging:
    """The buffers of one channel, allocated once, for messages of up to `chunk_blocks` blocks."""

    def __init__(self, pool: torch.Tensor, chunk_blocks: int, direct: bool, on_host: bool) -> None:
        """Prepare for a pool `[blocks, ...]`, whose numbers travel as bytes.

        direct: each block is a message, as the sender says
        on_host: the channel moves memory of the host, whatever the pool is in
        """
        self._pool = pool.view(torch.uint8).reshape(pool.shape[0], -1)
        self._device = pool.device
        self._direct = direct
        self._in_place = direct and self._device.type == "cpu"
        shape = (chunk_blocks, self._pool.shape[1])
        slots = 0 if self._in_place else SLOTS
        self._staging = [torch.empty(shape, dtype=torch.uint8, device=self._device) for _ in range(slots)]
        bounce = self._device.type == "cuda" and on_host
        self._host = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(slots * bounce)]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which everything here is to be called, and the channel too."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def outgoing(self, slot: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Return the messages that carry these blocks. The slot is in use until they have been sent."""
        if self._in_place:
            return [self._pool[block] for block in blocks]
        staging = self._staging[slot][: len(blocks)]
        gather_blocks(self._pool, self._indices(blocks), staging)
        if self._host:
            self._host[slot][: len(blocks)].copy_(staging, non_blocking=True)
        self._synchronise()
        return self._messages(slot, len(blocks))

    def incoming(self, slot: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Return the buffers for these blocks' messages; `settle` follows when they have arrived."""
        if self._in_place:
            return [self._pool[block] for block in blocks]
        return self._messages(slot, len(blocks))

    def settle(self, slot: int, blocks: Sequence[int]) -> None:
        """Put what has arrived in its place. When this returns it is in the pool."""
        if self._in_place:
            return
        staging = self._staging[slot][: len(blocks)]
        if self._host:
            staging.copy_(self._host[slot][: len(blocks)], non_blocking=True)
        scatter_blocks(staging, self._indices(blocks), self._pool)
        self._synchronise()

    def _messages(self, slot: int, count: int) -> list[torch.Tensor]:
        buffer = (self._host or self._staging)[slot][:count]
        return list(buffer.unbind()) if self._direct else [buffer.view(-1)]

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def block_bytes(pool: torch.Tensor) -> int:
    """Return the bytes of one block of a pool."""
    return int(pool[0].numel()) * int(pool.element_size())


def is_direct(pool: torch.Tensor) -> bool:
    """Whether a pool's blocks are best sent one by one."""
    return pool.device.type == "cpu" and block_bytes(pool) >= DIRECT_BYTES
