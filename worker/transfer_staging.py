"""How blocks get out of a pool into messages, and out of messages into a pool.

A block of all layers is one contiguous piece of memory. On a CPU, messages whose blocks lie in a row go
straight from the pool, or into it: copying them on both sides would halve the speed. Others, and those of a
GPU, are gathered side by side into a staging buffer, travel as one message and are scattered.

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
from kvhive.worker.transfer_cargo import Cargo

DEPTH = 32
"""Chunks on their way at a time: the more, the less either side waits for the other one's thread to be woken,
which on a busy machine takes longer than the bytes do."""

STAGED_DEPTH = 2
"""The same where each costs a buffer: one is filled or emptied while the other one is on its way."""


class Staging:
    """The buffers of one channel, allocated when needed, for messages of up to `most_blocks` blocks."""

    def __init__(self, pool: torch.Tensor, most_blocks: int, on_host: bool) -> None:
        """Prepare for a pool `[blocks, ...]`, whose numbers travel as bytes.

        on_host: the channel moves memory of the host, whatever the pool is in
        """
        self._pool = pool.view(torch.uint8).reshape(pool.shape[0], -1)
        self._device = pool.device
        self._shape = (most_blocks, self._pool.shape[1])
        self._bounces = pool.device.type == "cuda" and on_host
        self._buffers: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which everything here is to be called, and the channel too."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def load(self, cargo: Cargo) -> Loading:
        """Make ready for one transfer."""
        straight = self._stream is None and cargo.in_rows
        if not straight and not self._buffers:
            shape = (STAGED_DEPTH, *self._shape)  # one piece of memory, for the sake of huge pages
            self._buffers = list(torch.empty(shape, dtype=torch.uint8, device=self._device))
        if not straight and self._bounces and not self._host:
            self._host = [
                torch.empty(self._shape, dtype=torch.uint8, pin_memory=True) for _ in range(STAGED_DEPTH)
            ]
        if straight:
            return Straight(self._pool, cargo)
        return Staged(self, cargo, torch.tensor(cargo.blocks, dtype=torch.int64, device=self._device))

    def row(self, first: int, count: int) -> torch.Tensor | None:
        """Return blocks that lie in a row as a message of their own, where the channel can take them."""
        return self._pool[first : first + count] if self._device.type == "cpu" else None

    @property
    def most_blocks(self) -> int:
        """Of one message."""
        return self._shape[0]

    def gather(self, slot: int, blocks: torch.Tensor) -> torch.Tensor:
        """Put blocks side by side into a buffer that the channel can send."""
        buffer = self._buffers[slot][: len(blocks)]
        gather_blocks(self._pool, blocks, buffer)
        if self._bounces:
            self._host[slot][: len(blocks)].copy_(buffer, non_blocking=True)
        self._synchronise()
        return self.buffer(slot, len(blocks))

    def scatter(self, slot: int, blocks: torch.Tensor) -> None:
        """Put what the channel has received in its places. When this returns it is in the pool."""
        buffer = self._buffers[slot][: len(blocks)]
        if self._bounces:
            buffer.copy_(self._host[slot][: len(blocks)], non_blocking=True)
        scatter_blocks(buffer, blocks, self._pool)
        self._synchronise()

    def buffer(self, slot: int, count: int) -> torch.Tensor:
        """Return what the channel sends from and receives into."""
        return (self._host if self._bounces else self._buffers)[slot][:count]

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Straight:
    """A transfer that needs no buffers: its messages are rows of the pool."""

    depth, whole = DEPTH, True

    def __init__(self, pool: torch.Tensor, cargo: Cargo) -> None:
        self._pool = pool
        self._blocks = cargo.blocks

    def outgoing(self, slot: int, parts: Sequence[range]) -> list[torch.Tensor]:
        """Return the messages of a parcel."""
        firsts = [self._blocks[part.start] for part in parts]
        return [self._pool[first : first + len(part)] for first, part in zip(firsts, parts, strict=True)]

    incoming = outgoing

    def settle(self, slot: int, parts: Sequence[range]) -> None:
        """What has arrived is in its place."""


class Staged:
    """A transfer through buffers: a message takes the one of its slot, unless its blocks lie in a row."""

    depth, whole = STAGED_DEPTH, False

    def __init__(self, staging: Staging, cargo: Cargo, blocks: torch.Tensor) -> None:
        self._staging = staging
        self._cargo = cargo
        self._blocks = blocks

    def outgoing(self, slot: int, parts: Sequence[range]) -> list[torch.Tensor]:
        """Gather a message. The slot is in use until it has been sent."""
        [part] = parts
        row = self._row(part)
        return [self._staging.gather(slot, self._blocks[part.start : part.stop]) if row is None else row]

    def incoming(self, slot: int, parts: Sequence[range]) -> list[torch.Tensor]:
        """Return where a message goes; `settle` follows when it has arrived."""
        [part] = parts
        row = self._row(part)
        return [self._staging.buffer(slot, len(part)) if row is None else row]

    def settle(self, slot: int, parts: Sequence[range]) -> None:
        """Scatter what has arrived."""
        [part] = parts
        if self._row(part) is None:
            self._staging.scatter(slot, self._blocks[part.start : part.stop])

    def _row(self, part: range) -> torch.Tensor | None:
        cargo = self._cargo
        return self._staging.row(cargo.blocks[part.start], len(part)) if cargo.row(part) else None


Loading = Straight | Staged
"""How one transfer gets out of a pool, or into one."""


def block_bytes(pool: torch.Tensor) -> int:
    """Return the bytes of one block of a pool."""
    return int(pool[0].numel()) * int(pool.element_size())
