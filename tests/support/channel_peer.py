"""The other end of a channel, in a process of its own that can be stopped and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from kvhive.worker.transfer_channel import SENDER, ChannelBroken, ChannelMaker, ChannelPlan

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kvhive.worker.transfer_channel"])  # torch is imported once for all peers

WAIT_S = 30.0


def _send(plan: ChannelPlan, sizes: list[int], told: Connection) -> None:
    """Send one message of ones for each size; say how it went."""
    try:
        channel = ChannelMaker("127.0.0.1", torch.device("cpu")).make(plan, SENDER, WAIT_S)
        told.send("ready")
        for size in sizes:
            channel.wait(channel.begin([torch.ones(size, dtype=torch.uint8)]), WAIT_S)
        told.send("sent")
    except ChannelBroken as error:
        told.send(f"broken: {error}")


@contextlib.contextmanager
def sender(plan: ChannelPlan, sizes: list[int]) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Start a sender; it is killed at the end, whatever state it is in."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_send, args=(plan, sizes, there), daemon=True)
    process.start()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(10)


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
