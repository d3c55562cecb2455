"""Blocks through messages: straight or by staging buffers, whatever the numbers are; and seals."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from kvhive.kernels.fp8_cache import FP8
from kvhive.proto.block_hash import BlockHash
from kvhive.worker.transfer_channel import RECEIVER, SENDER, ChannelBroken, ChannelMaker, PairChannel
from kvhive.worker.transfer_staging import Staging
from kvhive.worker.transfer_stream import Cargo, Pace, TransferStopped, receive, send

DTYPES = [torch.float32, torch.bfloat16, FP8, torch.int32]
HASHES = [BlockHash(bytes([i]) * 32) for i in range(11)]
SOURCES, TARGETS = [3, 17, 4, 0, 19, 8, 7, 11, 2, 5, 13], [9, 1, 30, 4, 6, 22, 3, 12, 17, 0, 25]


def channel_pair(maker: ChannelMaker) -> tuple[PairChannel, PairChannel]:
    plan = maker.plan("pair")
    made: list[PairChannel] = []
    thread = threading.Thread(target=lambda: made.append(maker.make(plan, SENDER, 20)))
    thread.start()
    receiver = maker.make(plan, RECEIVER, 20)
    thread.join()
    return made[0], receiver


def pool_of(blocks: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[blocks, layers 2, 2, kv heads 2, block 4, head dim 8] of random bytes."""
    shape = (blocks, 2, 2, 2, 4, 8)
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def cargo_of(blocks: list[int], hashes: list[BlockHash] = HASHES, nonce: bytes = b"n" * 16) -> Cargo:
    return Cargo(nonce, hashes, blocks, chunk_blocks=3)


def move(
    pools: tuple[torch.Tensor, torch.Tensor],
    direct: bool,
    sent: Cargo,
    expected: Cargo,
    stopped: threading.Event | None = None,
) -> list[int]:
    """Send and receive in two threads; return what was told to have arrived. Raises the receiver's error."""
    source, target = channel_pair(ChannelMaker("127.0.0.1", torch.device("cpu")))
    told: list[int] = []

    def sending() -> None:
        with contextlib.suppress(ChannelBroken):  # when the receiver has given up
            send(source, Staging(pools[0], 3, direct, True), sent, Pace(time.monotonic() + 20, 3.0))

    thread = threading.Thread(target=sending)
    thread.start()
    try:
        pace = Pace(time.monotonic() + 20, 20.0, stopped or threading.Event())
        receive(target, Staging(pools[1], 3, direct, True), expected, pace, told.append)
    finally:
        target.close()
        thread.join(30)
        source.close()
    return told


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_comes_to_its_place_and_no_other_is_touched(direct: bool, dtype: torch.dtype) -> None:
    pools = pool_of(20, dtype, 1), pool_of(31, dtype, 2)
    before = pools[1].view(torch.uint8).clone()
    assert move(pools, direct, cargo_of(SOURCES), cargo_of(TARGETS)) == [3, 6, 9, 11]
    after, source = pools[1].view(torch.uint8), pools[0].view(torch.uint8)
    assert torch.equal(after[TARGETS], source[SOURCES])
    others = [block for block in range(31) if block not in TARGETS]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("what", ["nonce", "hash"])
def test_blocks_under_another_seal_are_not_taken_for_arrived(direct: bool, what: str) -> None:
    """The second chunk's seal is the first that differs."""
    other = [*HASHES[:4], BlockHash(b"x" * 32), *HASHES[5:]]
    sent = cargo_of(SOURCES, nonce=b"m" * 16) if what == "nonce" else cargo_of(SOURCES, other)
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    number = 0 if what == "nonce" else 1
    with pytest.raises(ChannelBroken, match=f"chunk {number} has another seal"):
        move(pools, direct, sent, cargo_of(TARGETS))


def test_a_transfer_that_nobody_wants_stops_between_two_chunks() -> None:
    stopped = threading.Event()
    stopped.set()
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    with pytest.raises(TransferStopped, match="cancelled"):
        move(pools, True, cargo_of(SOURCES), cargo_of(TARGETS), stopped)


def test_time_runs_out() -> None:
    pace = Pace(time.monotonic() - 0.1, 1.0)
    with pytest.raises(TransferStopped, match="out of time"):
        pace.next_limit()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_a_device_go_through_the_host(dtype: torch.dtype) -> None:
    """Over gloo, which is also what two workers of one GPU speak."""
    pools = pool_of(20, dtype, 1).cuda(), pool_of(31, dtype, 2).cuda()
    assert move(pools, False, cargo_of(SOURCES), cargo_of(TARGETS))[-1] == 11
    after, source = pools[1].cpu().view(torch.uint8), pools[0].cpu().view(torch.uint8)
    assert torch.equal(after[TARGETS], source[SOURCES])
