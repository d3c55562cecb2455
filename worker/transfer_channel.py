"""Channels between two workers over torch.distributed: one process group of two ranks for each direction.

No default group is made or touched: that one belongs to tensor parallelism. A channel is a ProcessGroup
object over a PrefixStore, on a TCPStore that the receiving worker hosts; the prefix names both workers, both
epochs and a nonce, so that a restarted worker, or a second try, meets nobody of the time before.

A dead or hung peer is an error within the time that `wait` is given: between two messages gloo says it at
once, but of a message that was cut off in the middle it only runs out of time (measured), so give it
seconds. A channel that has failed once is closed and never used again.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

SENDER, RECEIVER = 0, 1
"""The two ranks."""

SETUP_TIMEOUT_S = 5.0
"""Longest that either side waits for the other one to come to a new channel."""

CHANNELS_PER_STORE = 1024
"""A store keeps some hundred bytes of every channel that was made through it; then a new one begins."""

_BACKLOG = 64


class ChannelBroken(Exception):
    """The peer is gone, hung or never came; the channel is of no use any more."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """What both ends must agree on before there is a channel."""

    key: str
    store: str
    """host:port."""
    backend: str = "gloo"
    """`gloo` or `nccl`: of what the receiver can speak, what the sender chose."""


class PairChannel:
    """One direction between two workers. One thread at a time; waiting releases the GIL."""

    def __init__(self, group: ProcessGroup, backend: Any, rank: int, device: torch.device) -> None:
        self._group: ProcessGroup | None = group
        sends = rank == SENDER
        self._move: Any = group.send if sends else group.recv
        if not backend.supports_coalescing:  # gloo, without the way through torch's dispatcher
            self._move = backend.send if sends else backend.recv
        self._coalesces = bool(backend.supports_coalescing)
        self._peer = 1 - rank
        self.device = device
        """Where what it moves must be."""

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._group is None

    def begin(self, messages: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to send or to receive, whichever this end does, in the same order as the peer.

        Returns what `wait` waits for. The tensors belong to the channel until then. Raises ChannelBroken.
        """
        group, move = self._group, self._move
        if group is None or move is None:
            raise ChannelBroken("the channel is closed")
        try:
            if not self._coalesces:
                return [move([message], self._peer, 0) for message in messages]
            group._start_coalescing(self.device)
            for message in messages:
                move([message], self._peer, 0)
            return [group._end_coalescing(self.device)]
        except RuntimeError as error:
            raise ChannelBroken(_first_line(error)) from None

    def wait(self, works: list[Any], timeout_s: float) -> None:
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
            raise ChannelBroken(_first_line(error)) from None
        finally:
            works.clear()

    def close(self) -> None:
        """Tear it down; again does no harm. Afterwards nothing is written into a receiver's buffers."""
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError:
                group.shutdown()
        self._move = None  # it holds the backend


class ChannelMaker:
    """Makes one worker's channels. `plan` belongs to one thread, `make` to any."""

    def __init__(self, host: str, device: torch.device) -> None:
        """`host` is the address that this worker's own channels listen on, and nobody else's."""
        self._host = host
        self._device = device
        self._turn = threading.Lock()
        self._gloo_device: Any = None
        self._stores: dict[str, TCPStore] = {}
        """The newest two, by address: somebody may still be on the way to the older one."""
        self._planned = 0

    def backends(self) -> list[str]:
        """What this worker can speak, the best first."""
        return ["nccl", "gloo"] if self._device.type == "cuda" and _has_nccl() else ["gloo"]

    def plan(self, key: str) -> ChannelPlan:
        """Return the plan of a channel that this worker is to receive by, but for the sender's choice."""
        if self._planned % CHANNELS_PER_STORE == 0:
            store = _host_store(self._host)
            self._stores = {**dict([*self._stores.items()][-1:]), f"{self._host}:{store.port}": store}
        self._planned += 1
        return ChannelPlan(key, next(reversed(self._stores)))

    def make(self, plan: ChannelPlan, rank: int, timeout_s: float = SETUP_TIMEOUT_S) -> PairChannel:
        """Meet the peer, who does the same with the other rank. Raises ChannelBroken if it does not come."""
        limit = timedelta(seconds=timeout_s)
        try:
            store = PrefixStore(plan.key, self._join_store(plan, rank, limit))
            store.set_timeout(limit)
            group = ProcessGroup(store, rank, 2)
            backend, kind, device = self._backend(plan.backend, store, rank, limit)
            backend._set_sequence_number_for_group()
            group._set_default_backend(kind)
            group._register_backend(device, kind, backend)
        except RuntimeError as error:  # of which torch's DistError is one
            raise ChannelBroken(f"no channel {plan.key}: {_first_line(error)}") from None
        return PairChannel(group, backend, rank, device)

    def _join_store(self, plan: ChannelPlan, rank: int, limit: timedelta) -> TCPStore:
        if rank == RECEIVER:
            return self._stores[plan.store]
        host, _, port = plan.store.rpartition(":")
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)

    def _backend(self, name: str, store: PrefixStore, rank: int, limit: timedelta) -> tuple[Any, Any, Any]:
        if name == "nccl":
            return _nccl(store, rank, limit, self._device)
        with self._turn:
            if self._gloo_device is None:  # one for all channels: each has a thread and sockets of its own
                self._gloo_device = ProcessGroupGloo.create_device(hostname=self._host)
        options = ProcessGroupGloo._Options()
        options._timeout, options._threads, options._devices = limit, 1, [self._gloo_device]
        backend = ProcessGroupGloo(store, rank, 2, options)
        return backend, ProcessGroup.BackendType.GLOO, torch.device("cpu")


def _nccl(store: PrefixStore, rank: int, limit: timedelta, device: torch.device) -> tuple[Any, Any, Any]:
    # By default a watchdog that sees an error ends the process; here a broken pair is an everyday event.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    options.config.blocking = 0
    backend = ProcessGroupNCCL(store, rank, 2, options)
    backend.eager_connect_single_device(device)
    return backend, ProcessGroup.BackendType.NCCL, device


def _has_nccl() -> bool:
    return bool(torch.distributed.is_nccl_available())


def _host_store(host: str) -> TCPStore:
    """Host a store on one address; by itself torch would listen on all of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=SETUP_TIMEOUT_S),
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or ["unknown"])[0]
