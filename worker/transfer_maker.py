"""Makes one worker's channels, over the best backend that both ends can speak.

Both ends meet in a TCPStore that the receiving worker hosts, under a prefix that is the channel's key.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from kvhive.proto.errors import ConfigError
from kvhive.worker import transfer_meeting
from kvhive.worker.transfer_channel import RECEIVER, Channel, ChannelBroken, ChannelPlan
from kvhive.worker.transfer_group import first_line, gloo_channel, has_nccl, nccl_channel
from kvhive.worker.transfer_socket import SocketChannel

SETUP_TIMEOUT_S = 5.0
"""Longest that either side waits for the other one to come to a new channel."""

CHANNELS_PER_STORE = 1024
"""A store keeps some hundred bytes of every channel that was made through it; then a new one begins."""


class ChannelMaker:
    """`plan` belongs to one thread, `make` to any."""

    def __init__(self, host: str, device: torch.device, backend: str = "auto") -> None:
        """Make ready; nothing is opened yet.

        host: the address that this worker's own channels listen on, and nobody else's
        device: where the pool is
        backend: the only one to speak, or `auto`: all that the device can

        Raises ConfigError for one that the device cannot.
        """
        able = _backends_of(device)
        if backend not in ("auto", *able):
            raise ConfigError(
                f"workers.transfer.backend: must be one of auto, {', '.join(able)} "
                f"for a pool on {device.type}, is {backend!r}"
            )
        self._host = host
        self._device = device
        self._backends = able if backend == "auto" else [backend]
        self._turn = threading.Lock()
        self._gloo_device: Any = None
        self._stores: dict[str, TCPStore] = {}
        """The newest two, by address: somebody may still be on the way to the older one."""
        self._planned = 0

    def backends(self) -> list[str]:
        """What this worker can speak, the best first."""
        return list(self._backends)

    def plan(self, key: str) -> ChannelPlan:
        """Return the plan of a channel that this worker is to receive by; the sender may choose otherwise."""
        if self._planned % CHANNELS_PER_STORE == 0:
            store = _host_store(self._host)
            self._stores = {**dict([*self._stores.items()][-1:]), f"{self._host}:{store.port}": store}
        self._planned += 1
        return ChannelPlan(key, next(reversed(self._stores)), self._backends[0])

    def make(
        self,
        plan: ChannelPlan,
        rank: int,
        timeout_s: float = SETUP_TIMEOUT_S,
        stopped: threading.Event | None = None,
    ) -> Channel:
        """Meet the peer, who does the same with the other rank. Raises ChannelBroken if it does not come.

        Over tcp it raises TransferStopped soon after `stopped` is set; a process group waits its time.
        """
        stopped = stopped or threading.Event()
        limit = timedelta(seconds=timeout_s)
        try:
            store = PrefixStore(plan.key, self._join_store(plan, rank, limit))
            store.set_timeout(limit)
            if plan.backend == "nccl":
                return nccl_channel(store, rank, limit, self._device)
            if plan.backend == "gloo":
                return gloo_channel(store, rank, limit, self._shared_gloo_device())
            if rank == RECEIVER:
                return SocketChannel(transfer_meeting.accept(store, plan.key, self._host, timeout_s, stopped))
            return SocketChannel(transfer_meeting.connect(store, plan.key, timeout_s, stopped))
        except RuntimeError as error:  # of which torch's DistError is one
            raise ChannelBroken(f"no channel {plan.key}: {first_line(error)}") from None

    def _join_store(self, plan: ChannelPlan, rank: int, limit: timedelta) -> TCPStore:
        if rank == RECEIVER:
            return self._stores[plan.store]
        host, _, port = plan.store.rpartition(":")
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)

    def _shared_gloo_device(self) -> Any:
        """Return the one for all channels: each has a thread and sockets of its own."""
        with self._turn:
            if self._gloo_device is None:
                self._gloo_device = ProcessGroupGloo.create_device(hostname=self._host)
            return self._gloo_device


def _backends_of(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["tcp", "gloo"]
    return ["nccl", "gloo"] if has_nccl() else ["gloo"]


def _host_store(host: str) -> TCPStore:
    """Host a store on one address; by itself torch would listen on all of them."""
    with transfer_meeting.listen(host) as listener:
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=SETUP_TIMEOUT_S),
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )
