"""The tcp channel alone: parts of chunks, and a limit that is of the whole chunk."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from channel_peer import cargo_of, unhurried

from kvhive.worker.transfer_channel import ChannelBroken
from kvhive.worker.transfer_pace import Pace
from kvhive.worker.transfer_socket import MAX_BUFFERS, SocketChannel, _rows


@pytest.fixture
def ends() -> Iterator[tuple[SocketChannel, socket.socket]]:
    """A channel, and what is at the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname(), 10)
        channel = SocketChannel(listener.accept()[0])
    yield channel, peer
    channel.close()
    peer.close()


def test_blocks_that_lie_side_by_side_are_one_buffer() -> None:
    memory = memoryview(bytes(range(100)))
    rows = _rows(memory, 10, [4, 5, 6, 2, 9, 1, 0])
    assert [(row[0], len(row)) for row in rows] == [(40, 30), (20, 10), (90, 10), (10, 10), (0, 10)]
    assert [(row[0], len(row)) for row in _rows(memory, 10, [3])] == [(30, 10)]


def test_what_the_kernel_takes_a_part_of_goes_on_where_it_stopped(
    ends: tuple[SocketChannel, socket.socket],
) -> None:
    """In the middle of a buffer, at its end, after many; and never more buffers than it takes."""
    rng = random.Random(5)
    buffers = [memoryview(rng.randbytes(rng.choice([1, 2, 30]))) for _ in range(3 * MAX_BUFFERS)]
    taken = bytearray()

    def take(offered: Sequence[memoryview]) -> int:
        assert 0 < len(offered) <= MAX_BUFFERS and all(len(each) for each in offered)
        whole = b"".join(offered)
        part = whole[: rng.choice([1, 2, 31, 500, len(whole)])]
        taken.extend(part)
        return len(part)

    ends[0]._move(take, socket.SO_SNDTIMEO, buffers, 30.0)
    assert taken == b"".join(buffers)


def test_a_peer_that_dribbles_has_no_more_time_than_one_that_is_silent(
    ends: tuple[SocketChannel, socket.socket],
) -> None:
    channel, peer = ends
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.02):
            peer.sendall(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    began = time.monotonic()
    pool = torch.zeros(4, 2**20, dtype=torch.uint8)
    with pytest.raises(ChannelBroken, match=r"a chunk did not get through within 0\.3 s"):
        channel.receive(pool, cargo_of([0, 2], 2), Pace(began + 60, 0.3), lambda count: None)
    over.set()
    thread.join()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("first", [b"", b"x" * 100])
def test_a_peer_that_hangs_up_is_told_from_one_that_is_slow(
    ends: tuple[SocketChannel, socket.socket], first: bytes
) -> None:
    channel, peer = ends
    peer.sendall(first)
    peer.close()
    pool = torch.zeros(4, 2**20, dtype=torch.uint8)
    with pytest.raises(ChannelBroken, match=r"the peer has hung up|the connection broke: Connection reset"):
        channel.receive(pool, cargo_of([0, 2], 2), unhurried(), lambda count: None)
    with pytest.raises(ChannelBroken, match="the connection broke: "):
        for _ in range(100):  # the first ones may be gone before the peer's kernel says no
            channel.send(pool, cargo_of([0, 2], 2), unhurried())
