"""Both ends of channels: in two threads, or the sending one in a process of its own that can be struck."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess

import torch

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import RECEIVER, SENDER, Channel, ChannelBroken, ChannelPlan
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_pace import Pace

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kvhive.worker.transfer_maker"])  # torch is imported once for all peers

WAIT_S = 30.0
BLOCK_BYTES = 2**20
CHUNK_BLOCKS = 64
"""More than the kernel takes of who sends while nobody receives, however large it lets its buffers grow."""


def local_maker(backend: str) -> ChannelMaker:
    """Make channels on this machine's memory."""
    return ChannelMaker("127.0.0.1", torch.device("cpu"), backend)


def channel_pair(maker: ChannelMaker, key: str = "pair") -> tuple[Channel, Channel]:
    """Return both ends of a channel: the one that sends first."""
    plan = maker.plan(key)
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(maker.make(plan, SENDER, WAIT_S)))
    thread.start()
    receiver = maker.make(plan, RECEIVER, WAIT_S)
    thread.join()
    return made[0], receiver


def cargo_of(blocks: list[int], chunk_blocks: int, nonce: bytes = b"n" * 16) -> Cargo:
    """Some blocks, each with a hash of its own."""
    hashes = [BlockHash(index.to_bytes(32, "little")) for index in range(len(blocks))]
    return Cargo(nonce, hashes, blocks, chunk_blocks)


def unhurried(stopped: threading.Event | None = None) -> Pace:
    """Time enough."""
    return Pace(time.monotonic() + WAIT_S, WAIT_S, stopped or threading.Event())


def impatient() -> Pace:
    """For who may be hung up on: gloo does not always wake who sends then, and he has to run out of time."""
    return Pace(time.monotonic() + WAIT_S, 3.0)


def move(
    ends: tuple[Channel, Channel],
    pools: tuple[torch.Tensor, torch.Tensor],
    cargoes: tuple[Cargo, Cargo],
    stopped: threading.Event | None = None,
) -> list[int]:
    """Send and receive in two threads; return what was told to have arrived. Raises the receiver's error.

    After an error the receiver is closed, as its user has to.
    """
    told: list[int] = []

    def sending() -> None:
        with contextlib.suppress(ChannelBroken):  # when the receiver has given up
            ends[0].send(pools[0], cargoes[0], impatient())

    thread = threading.Thread(target=sending)
    thread.start()
    try:
        ends[1].receive(pools[1], cargoes[1], unhurried(stopped), told.append)
    except BaseException:
        ends[1].close()
        raise
    finally:
        thread.join(WAIT_S)
    return told


def _send(plan: ChannelPlan, chunks: int) -> None:
    blocks = chunks * CHUNK_BLOCKS
    pool = torch.ones(CHUNK_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    cargo = cargo_of([index % CHUNK_BLOCKS for index in range(blocks)], CHUNK_BLOCKS)
    with contextlib.suppress(ChannelBroken):
        local_maker("auto").make(plan, SENDER, WAIT_S).send(pool, cargo, unhurried())


@contextlib.contextmanager
def sender(plan: ChannelPlan, chunks: int) -> Iterator[ForkServerProcess]:
    """Start a sender of chunks of ones; it is killed at the end, whatever state it is in."""
    process = _CONTEXT.Process(target=_send, args=(plan, chunks), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
