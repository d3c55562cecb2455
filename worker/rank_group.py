"""The ranks of one worker as a group: what they tell each other, add up and gather.

Each rank is a process with a device. They are on one machine and meet in a file that only their user can
read, so nothing listens beyond loopback. The group is an object of its own: torch's default group is left
alone, and so are the groups of anyone else in this process.

Host memory travels through gloo, a device's tensors through NCCL. Sums through gloo are added in the order of
the ranks, so that a row's bits do not depend on what else is summed with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo

from kvhive.proto.errors import Unavailable
from kvhive.worker.shard import Shard

RANK_TIMEOUT_S = 30.0
"""How long a rank waits for another within a step. A killed one is found at once: its connections close."""
NCCL_TIMEOUT_S = 120.0
"""How long a device waits for another; then torch ends the process. Kernels compile at their first use."""
MEETING_TIMEOUT_S = 120.0
"""How long ranks that have begun wait until all have."""
LOAD_TIMEOUT_S = 600.0
"""How long ranks wait for each other while they load: their disks and caches may differ."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one worker find each other, once."""

    path: str
    """A file in a new directory; it need not exist. When all have met, only NCCL still reads it."""
    ranks: int


class RankGroup:
    """This process among the ranks. Every rank must make the same calls in the same order.

    A rank that is lost, or does not answer within the time-out, is Unavailable; nothing can be done with the
    group after that.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, ordered: bool = True) -> None:
        """Meet the other ranks; returns when all are there.

        ordered: sums on a CUDA device, too, are added in the order of the ranks, at more cost
        """
        self.shard = Shard(rank, meeting.ranks)
        self.turn = threading.Lock()
        """Held by whoever talks to the other ranks."""
        self._timeout = timedelta(seconds=LOAD_TIMEOUT_S)
        self._ordered = ordered
        store = FileStore(meeting.path, meeting.ranks)
        store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
        try:
            self._gloo = _gloo(PrefixStore("gloo", store), self.shard)
            self._nccl = None
            if device.type == "cuda":
                self._nccl = _nccl(PrefixStore("nccl", store), self.shard, device)
        except RuntimeError as error:
            raise Unavailable(f"rank {rank} could not meet the other ranks: {_reason(error)}") from error
        self.arrive()

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks but this one."""
        return tuple(rank for rank in range(self.shard.ranks) if rank != self.shard.rank)

    def started(self) -> None:
        """From here on no rank may be silent within a step for longer than RANK_TIMEOUT_S."""
        self._timeout = timedelta(seconds=RANK_TIMEOUT_S)

    def tell(self, message: torch.Tensor) -> None:
        """Send host memory from rank 0 to all others."""
        self._swap([(rank, message) for rank in self.others], [])

    def hear(self, message: torch.Tensor) -> None:
        """Receive from rank 0 what it tells, into a tensor of that size."""
        self._swap([], [(0, message)])

    def arrive(self) -> None:
        """Return when every rank has come this far."""
        self.smallest(0)

    def smallest(self, number: int) -> int:
        """Return the smallest of the ranks' numbers, to every rank."""
        parts = self._exchange(torch.tensor([number]))
        return min(int(part) for part in parts)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, to every rank; of 16 bits each sum is rounded once.

        The argument may be overwritten.
        """
        if not partial.numel():
            return partial
        if self._nccl is not None and not self._ordered:
            self._nccl.allreduce([partial]).wait()
            return partial
        first, *rest = self._exchange(partial.contiguous())
        total = first.float()
        for part in rest:
            total = total + part
        return total.to(partial.dtype)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the ranks' [rows, columns] side by side on rank 0; elsewhere what was given."""
        if not columns.numel():
            return columns.new_empty(columns.shape[0], columns.shape[1] * self.shard.ranks)
        columns = columns.contiguous()
        if self._nccl is not None:
            return torch.cat(self._exchange(columns), dim=1)
        if self.shard.rank:
            self._swap([(0, columns)], [])
            return columns
        parts = [torch.empty_like(columns) for _ in self.others]
        self._swap([], list(zip(self.others, parts, strict=True)))
        return torch.cat([columns, *parts], dim=1)

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape, in the order of the ranks."""
        parts = [
            own if rank == self.shard.rank else torch.empty_like(own) for rank in range(self.shard.ranks)
        ]
        if own.is_cuda:
            assert self._nccl is not None
            self._nccl.allgather([parts], [own]).wait()
            return parts
        self._swap([(rank, own) for rank in self.others], [(rank, parts[rank]) for rank in self.others])
        return parts

    def _swap(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send and receive host memory, at once; messages between two ranks keep their order.

        One message between any two ranks wakes two threads fewer than gloo's own collectives.
        """
        sending = [(rank, self._begin(self._gloo.send, tensor, rank)) for rank, tensor in sent]
        receiving = [(rank, self._begin(self._gloo.recv, tensor, rank)) for rank, tensor in received]
        # What comes in tells of a loss at once; what goes out, only when nobody takes it.
        for rank, work in (*receiving, *sending):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise Unavailable(f"rank {rank} is lost: {_reason(error)}") from error

    def _begin(self, transfer: Any, tensor: torch.Tensor, rank: int) -> Any:
        try:
            return transfer([tensor], rank, 0)
        except RuntimeError as error:  # the connection is known to be closed
            raise Unavailable(f"rank {rank} is lost: {_reason(error)}") from error


def _gloo(store: Any, shard: Shard) -> Any:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return ProcessGroupGloo(store, shard.rank, shard.ranks, options)


def _nccl(store: Any, shard: Shard, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from builds of torch without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)
    group = ProcessGroupNCCL(store, shard.rank, shard.ranks, options)
    group.eager_connect_single_device(device)
    return group


def _reason(error: RuntimeError) -> str:
    """Return what gloo or NCCL says, without the place in their source and their advice."""
    line = str(error).strip().splitlines()[0]
    return line.rpartition("cc:")[2].partition("] ")[2].partition(". ")[0] or line
