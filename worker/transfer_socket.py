"""Channels over TCP between pools in the hosts' memory: the kernel reads from one and writes into the other.

A chunk is one system call on each side, whatever the layout of the pools: it is given a buffer for each row
of blocks that lie side by side, and one for the seal. So nothing is copied that a plain send and recv of one
tensor would not copy, and a chunk on its way needs no memory of ours.
"""

from __future__ import annotations

import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from kvhive.worker.transfer_cargo import SEAL_BYTES, Cargo
from kvhive.worker.transfer_channel import ChannelBroken, check_seal
from kvhive.worker.transfer_pace import Pace
from kvhive.worker.transfer_staging import as_bytes

MAX_BUFFERS = 1024
"""Most that one system call takes (IOV_MAX)."""


class SocketChannel:
    """A channel as transfer_channel.Channel has it."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection, on which nothing is on its way."""
        self._connection: socket.socket | None = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # the kernel keeps the time: it goes on after a part of a chunk

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._connection is None

    def send(self, pool: torch.Tensor, cargo: Cargo, pace: Pace) -> None:
        """Send everything; see Channel."""
        connection, (memory, size) = self._opened(), _memory(pool)
        for chunk in cargo.chunks:
            buffers = _rows(memory, size, cargo.blocks_of(chunk))
            pace.throttle(len(chunk) * size)
            buffers.append(memoryview(cargo.seal(chunk)))
            self._move(connection.sendmsg, socket.SO_SNDTIMEO, buffers, pace.next_limit())

    def receive(self, pool: torch.Tensor, cargo: Cargo, pace: Pace, arrived: Callable[[int], None]) -> None:
        """Receive everything; see Channel."""
        connection, (memory, size) = self._opened(), _memory(pool)

        def receive(buffers: Sequence[memoryview]) -> int:
            return connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]

        for number, chunk in enumerate(cargo.chunks):
            expected, seal = cargo.seal(chunk), bytearray(SEAL_BYTES)  # while it is on its way
            buffers = [*_rows(memory, size, cargo.blocks_of(chunk)), memoryview(seal)]
            self._move(receive, socket.SO_RCVTIMEO, buffers, pace.next_limit())
            check_seal(number, bytes(seal), expected)
            arrived(chunk.stop)

    def close(self) -> None:
        """Hang up; again does no harm."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self) -> socket.socket:
        if self._connection is None:
            raise ChannelBroken("the channel is closed")
        return self._connection

    def _move(
        self,
        move: Callable[[Sequence[memoryview]], int],
        option: int,
        buffers: list[memoryview],
        limit_s: float,
    ) -> None:
        """Fill or empty all buffers in order, the last one within the limit. Raises ChannelBroken."""
        connection, deadline = self._opened(), time.monotonic() + limit_s
        begins, done = [0, *accumulate(map(len, buffers))], 0
        try:
            while done < begins[-1]:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                connection.setsockopt(socket.SOL_SOCKET, option, _timeval(left_s))
                at = bisect_right(begins, done) - 1
                rest = buffers[at][done - begins[at] :]
                moved = move([rest, *buffers[at + 1 : at + MAX_BUFFERS]])
                if not moved:
                    raise ChannelBroken("the peer has hung up")
                done += moved
        except (TimeoutError, BlockingIOError):
            raise ChannelBroken(f"a chunk did not get through within {limit_s:.3g} s") from None
        except OSError as error:
            raise ChannelBroken(f"the connection broke: {error.strerror or error}") from None


def _memory(pool: torch.Tensor) -> tuple[memoryview, int]:
    """Return a pool's bytes, and how many of them are a block."""
    memory = as_bytes(pool).numpy()
    return memoryview(memory).cast("B"), memory.shape[1]


def _rows(memory: memoryview, size: int, blocks: Sequence[int]) -> list[memoryview]:
    """Return the memory of some blocks, in order: one buffer for each row that lies side by side."""
    rows, begin, end = [], blocks[0], blocks[0]
    for block in blocks:
        if block != end:
            rows.append(memory[begin * size : end * size])
            begin = block
        end = block + 1
    rows.append(memory[begin * size : end * size])
    return rows


def _timeval(seconds: float) -> bytes:
    """Return seconds as socket options take them, rounded up: 0 would be for ever."""
    micros = int(seconds * 1e6) + 1
    return struct.pack("@ll", *divmod(micros, 1_000_000))
