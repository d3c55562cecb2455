"""Buffers of a process group's channel: blocks are gathered side by side into one, and scattered out of one.

A block of all layers is one contiguous piece of memory. All of it happens on the transfer's own thread and,
on a GPU, on a stream of its own. That is safe beside a running step: what is sent is registered, so nobody
writes to it, and what is received has no hash yet, so nobody reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from kvhive.kernels.block_copy import gather_blocks, scatter_blocks

DEPTH = 2
"""Buffers: one is filled or emptied while the other one is on its way."""


class Staging:
    """For chunks of up to `most_blocks` blocks of pools like one, `[blocks, bytes]`."""

    def __init__(self, pool: torch.Tensor, most_blocks: int, on_host: bool) -> None:
        """Allocate. on_host: what the channel moves must be in the host's memory, wherever the pool is."""
        self._device = pool.device
        shape = (DEPTH, most_blocks, pool.shape[1])  # one piece of memory, for the sake of huge pages
        self._buffers = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._bounces = pool.device.type == "cuda" and on_host
        self._moved = self._buffers
        """What the channel sends from and receives into."""
        if self._bounces:
            self._moved = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def serves(self, pool: torch.Tensor, most_blocks: int) -> bool:
        """Whether it can do with chunks of so many blocks of this pool."""
        _, blocks, nbytes = self._buffers.shape
        return pool.device == self._device and pool.shape[1] == nbytes and bool(most_blocks <= blocks)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which everything here is to be called, and the channel too."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def places(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return block ids as `gather` and `scatter` take them."""
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def buffer(self, slot: int, count: int) -> torch.Tensor:
        """Return a slot's buffer for so many blocks, which the channel can send and receive."""
        return self._moved[slot, :count]

    def gather(self, slot: int, pool: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Put blocks of a pool side by side into a slot's buffer, and return it."""
        count = len(places)
        gather_blocks(pool, places, self._buffers[slot, :count])
        if self._bounces:
            self._moved[slot, :count].copy_(self._buffers[slot, :count], non_blocking=True)
        self._synchronise()
        return self.buffer(slot, count)

    def scatter(self, slot: int, pool: torch.Tensor, places: torch.Tensor) -> None:
        """Put what the channel has received in its places of a pool. When this returns it is in the pool."""
        count = len(places)
        if self._bounces:
            self._buffers[slot, :count].copy_(self._moved[slot, :count], non_blocking=True)
        scatter_blocks(self._buffers[slot, :count], places, pool)
        self._synchronise()

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def block_bytes(pool: torch.Tensor) -> int:
    """Return the bytes of one block of a pool."""
    return int(pool[0].numel()) * int(pool.element_size())


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool `[blocks, ...]` as `[blocks, bytes]`, the same memory."""
    return pool.view(torch.uint8).reshape(pool.shape[0], -1)
