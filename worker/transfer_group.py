"""Channels over torch.distributed: a process group of two ranks, and staging buffers on both sides.

No default group is made or touched: that one belongs to tensor parallelism. A channel is a ProcessGroup
object over a PrefixStore, whose prefix names both workers, both epochs and a nonce, so that a restarted
worker, or a second try, meets nobody of the time before.

Between two messages gloo says at once that a peer is dead; but of a message that was cut off in the middle it
only runs out of time (measured), so give it seconds.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from kvhive.worker.transfer_cargo import SEAL_BYTES, Cargo
from kvhive.worker.transfer_channel import SENDER, ChannelBroken, check_seal
from kvhive.worker.transfer_pace import Pace
from kvhive.worker.transfer_staging import DEPTH, Staging, as_bytes


class GroupChannel:
    """A channel as transfer_channel.Channel has it: a chunk is gathered, is one message, and is scattered."""

    def __init__(self, group: ProcessGroup, backend: Any, rank: int, device: torch.device) -> None:
        """device: where what the backend moves must be"""
        self._group: ProcessGroup | None = group
        sends = rank == SENDER
        self._move: Any = group.send if sends else group.recv
        if not backend.supports_coalescing:  # gloo, without the way through torch's dispatcher
            self._move = backend.send if sends else backend.recv
        self._coalesces = bool(backend.supports_coalescing)
        self._peer = 1 - rank
        self._device = device
        self._staging: Staging | None = None

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._group is None

    def send(self, pool: torch.Tensor, cargo: Cargo, pace: Pace) -> None:
        """Send everything; see Channel."""
        pool = as_bytes(pool)
        staging = self._ready(pool, cargo)
        pending: deque[list[Any]] = deque()
        try:
            with staging.stream():
                places = staging.places(cargo.blocks)
                for number, chunk in enumerate(cargo.chunks):
                    if len(pending) == DEPTH:
                        self._wait(pending.popleft(), pace.next_limit())
                    message = staging.gather(number % DEPTH, pool, places[chunk.start : chunk.stop])
                    pace.throttle(message.numel())
                    pace.next_limit()
                    works = self._begin([message])
                    seal = torch.frombuffer(bytearray(cargo.seal(chunk)), dtype=torch.uint8)
                    pending.append(works + self._begin([seal.to(self._device)]))
                while pending:  # who has all of it may hang up before this thread knows
                    self._wait(pending.popleft(), pace.last_limit())
        finally:
            pending.clear()  # who catches the error keeps this frame, and must not keep what is in flight

    def receive(self, pool: torch.Tensor, cargo: Cargo, pace: Pace, arrived: Callable[[int], None]) -> None:
        """Receive everything; see Channel."""
        pool, chunks = as_bytes(pool), cargo.chunks
        staging = self._ready(pool, cargo)
        pending: deque[tuple[torch.Tensor, list[Any]]] = deque()

        def expect(number: int) -> None:
            works = self._begin([staging.buffer(number % DEPTH, len(chunks[number]))])
            seal = torch.empty(SEAL_BYTES, dtype=torch.uint8, device=self._device)
            pending.append((seal, works + self._begin([seal])))

        try:
            with staging.stream():
                places = staging.places(cargo.blocks)
                for number in range(min(DEPTH, len(chunks))):
                    expect(number)
                for number, chunk in enumerate(chunks):
                    seal, works = pending.popleft()
                    expected = cargo.seal(chunk)  # while it is on its way
                    self._wait(works, pace.next_limit())
                    check_seal(number, bytes(seal.tolist()), expected)
                    staging.scatter(number % DEPTH, pool, places[chunk.start : chunk.stop])
                    arrived(chunk.stop)
                    if number + DEPTH < len(chunks):
                        expect(number + DEPTH)
        finally:
            pending.clear()

    def close(self) -> None:
        """Tear it down; again does no harm. Its buffers go with it: something may be on the way into them."""
        group, self._group, self._staging = self._group, None, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError:
                group.shutdown()
        self._move = None  # it holds the backend

    def _ready(self, pool: torch.Tensor, cargo: Cargo) -> Staging:
        """Return the buffers, for chunks as large as these. Raises ChannelBroken."""
        if self.closed:
            raise ChannelBroken("the channel is closed")
        most_blocks = min(cargo.chunk_blocks, len(cargo.blocks))
        if self._staging is None or not self._staging.serves(pool, most_blocks):
            self._staging = Staging(pool, most_blocks, self._device.type == "cpu")
        return self._staging

    def _begin(self, messages: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to send or to receive, whichever this end does, in the same order as the peer.

        Returns what `_wait` waits for. The tensors belong to the channel until then. Raises ChannelBroken.
        """
        group, move = self._group, self._move
        if group is None or move is None:
            raise ChannelBroken("the channel is closed")
        try:
            if not self._coalesces:
                return [move([message], self._peer, 0) for message in messages]
            group._start_coalescing(self._device)
            for message in messages:
                move([message], self._peer, 0)
            return [group._end_coalescing(self._device)]
        except RuntimeError as error:
            raise ChannelBroken(first_line(error)) from None

    def _wait(self, works: list[Any], timeout_s: float) -> None:
        """Wait until all have arrived, or ChannelBroken. Empties the list either way.

        The last one first: they arrive in order, so that this thread is woken once for all of them. What is
        still in flight after an error keeps its buffers alive until `close`.
        """
        limit = timedelta(seconds=max(timeout_s, 0.001))
        try:
            while works:
                works[-1].wait(limit)
                del works[-1]
        except RuntimeError as error:  # torch has no other for "peer gone" and "too late"
            raise ChannelBroken(first_line(error)) from None
        finally:
            works.clear()


def gloo_channel(store: PrefixStore, rank: int, limit: timedelta, gloo_device: Any) -> GroupChannel:
    """Meet the peer over gloo. Raises RuntimeError, as torch does."""
    options = ProcessGroupGloo._Options()
    options._timeout, options._threads, options._devices = limit, 1, [gloo_device]
    backend = ProcessGroupGloo(store, rank, 2, options)
    return _channel(store, rank, backend, ProcessGroup.BackendType.GLOO, torch.device("cpu"))


def nccl_channel(store: PrefixStore, rank: int, limit: timedelta, device: torch.device) -> GroupChannel:
    """Meet the peer over NCCL. Raises RuntimeError, as torch does."""
    # By default a watchdog that sees an error ends the process; here a broken pair is an everyday event.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    options.config.blocking = 0
    backend = ProcessGroupNCCL(store, rank, 2, options)
    backend.eager_connect_single_device(device)
    return _channel(store, rank, backend, ProcessGroup.BackendType.NCCL, device)


def has_nccl() -> bool:
    """Whether this build of torch has it."""
    return bool(torch.distributed.is_nccl_available())


def first_line(error: RuntimeError) -> str:
    """Return what torch says without the stack that follows."""
    return (str(error).splitlines() or ["unknown"])[0]


def _channel(store: PrefixStore, rank: int, backend: Any, kind: Any, device: torch.device) -> GroupChannel:
    group = ProcessGroup(store, rank, 2)
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return GroupChannel(group, backend, rank, device)
