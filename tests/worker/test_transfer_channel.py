"""A channel, whatever it is made of: what arrives, what a dead or hung peer is, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import threading
import time

import pytest
import torch
from channel_peer import (
    BLOCK_BYTES,
    CHUNK_BLOCKS,
    cargo_of,
    channel_pair,
    impatient,
    local_maker,
    move,
    open_files,
    sender,
    unhurried,
)

from kvhive.kernels.fp8_cache import FP8
from kvhive.worker.transfer_channel import RECEIVER, SENDER, Channel, ChannelBroken, ChannelPlan
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_pace import Pace, TransferStopped

DTYPES = [torch.float32, torch.bfloat16, FP8, torch.int32]
SOURCES, TARGETS = [3, 17, 4, 0, 19, 8, 7, 11, 2, 5, 13], [9, 1, 30, 4, 6, 22, 3, 12, 17, 0, 25]

Ends = tuple[Channel, Channel]
Pools = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", params=["tcp", "gloo"])
def maker(request: pytest.FixtureRequest) -> ChannelMaker:
    return local_maker(request.param)


@pytest.fixture
def ends(maker: ChannelMaker) -> object:
    both = channel_pair(maker, secrets.token_hex(8))
    yield both
    for end in both:
        end.close()


def pool_of(blocks: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[blocks, layers 2, 2, kv heads 2, block 4, head dim 8] of random bytes."""
    shape = (blocks, 2, 2, 2, 4, 8)
    return random_bytes(torch.Size(shape).numel() * dtype.itemsize, seed).view(dtype).view(shape)


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def check_moved(ends: Ends, pools: Pools, places: tuple[list[int], list[int]], chunk: int) -> None:
    """Every byte comes to its place, and no other one is touched."""
    expected = pools[1].view(torch.uint8).clone()
    expected[places[1]] = pools[0].view(torch.uint8)[places[0]]
    told = move(ends, pools, (cargo_of(places[0], chunk), cargo_of(places[1], chunk)))
    blocks = len(places[0])
    assert told == [*range(chunk, blocks, chunk), blocks]
    assert torch.equal(pools[1].view(torch.uint8), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_comes_to_its_place_and_no_other_is_touched(ends: Ends, dtype: torch.dtype) -> None:
    check_moved(ends, (pool_of(20, dtype, 1), pool_of(31, dtype, 2)), (SOURCES, TARGETS), 3)


def test_one_channel_serves_chains_of_any_layout_one_after_the_other(ends: Ends) -> None:
    """Rows and single blocks, blocks of a byte and of many, chunks of one block and of all."""
    rng = random.Random(7)
    for turn in range(25):
        size, blocks = rng.choice([1, 3, 64, 5000]), rng.randint(1, 60)
        pools = tuple(random_bytes(80 * size, turn + seed).view(80, size) for seed in (0, 100))
        places = [rng.sample(range(80), blocks) for _ in (0, 1)]
        for side in places:
            if rng.random() < 0.5:  # rows, cut where the other side's are not
                side.sort()
        check_moved(ends, (pools[0], pools[1]), (places[0], places[1]), rng.randint(1, blocks))


def test_a_chunk_may_have_more_blocks_than_one_system_call_takes(ends: Ends) -> None:
    pools = tuple(random_bytes(2 * 2500 * 7, seed).view(5000, 7) for seed in (1, 2))
    scattered = [list(range(first, 5000, 2)) for first in (0, 1)]
    random.Random(1).shuffle(scattered[1])
    check_moved(ends, (pools[0], pools[1]), (scattered[0], scattered[1]), 2400)


def test_a_chunk_may_be_larger_than_what_the_kernel_takes_at_a_time(ends: Ends) -> None:
    pools = tuple(random_bytes(8 * 2**22, seed).view(8, 2**22) for seed in (1, 2))
    check_moved(ends, (pools[0], pools[1]), ([6, 4, 2, 0], [1, 5, 3, 7]), 4)


@pytest.mark.parametrize("what", ["nonce", "hash"])
def test_blocks_under_another_seal_are_not_taken_for_arrived(ends: Ends, what: str) -> None:
    """The second chunk's seal is the first that differs."""
    expected = cargo_of(TARGETS, 3)
    sent = cargo_of(SOURCES, 3, nonce=(b"m" if what == "nonce" else b"n") * 16)
    if what == "hash":
        sent.hashes[4], sent.hashes[5] = sent.hashes[5], sent.hashes[4]  # type: ignore[index]
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    number = 0 if what == "nonce" else 1
    with pytest.raises(ChannelBroken, match=f"chunk {number} has another seal"):
        move(ends, pools, (sent, expected))


def test_a_transfer_that_nobody_wants_stops_between_two_chunks(ends: Ends) -> None:
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    stopped = threading.Event()
    told: list[int] = []

    def arrived(count: int) -> None:
        told.append(count)
        stopped.set()

    thread = threading.Thread(target=quietly_send, args=(ends[0], pools[0]))
    thread.start()
    with pytest.raises(TransferStopped, match="cancelled"):
        ends[1].receive(pools[1], cargo_of(TARGETS, 3), unhurried(stopped), arrived)
    ends[1].close()
    thread.join()
    assert told == [3]


def quietly_send(channel: Channel, pool: torch.Tensor) -> None:
    with contextlib.suppress(ChannelBroken):
        channel.send(pool, cargo_of(SOURCES, 3), impatient())


def test_who_hangs_up_with_everything_in_hand_breaks_no_channel(ends: Ends) -> None:
    """The receiver's call ends when it has all, which the sending thread may learn a little later."""
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    pace = unhurried()

    def arrived(count: int) -> None:
        if count == len(TARGETS):
            pace.stopped.set()

    receiving = (pools[1], cargo_of(TARGETS, 3), unhurried(), arrived)
    thread = threading.Thread(target=ends[1].receive, args=receiving)
    thread.start()
    ends[0].send(pools[0], cargo_of(SOURCES, 3), pace)
    thread.join()
    assert torch.equal(pools[1].view(torch.uint8)[TARGETS], pools[0].view(torch.uint8)[SOURCES])


def test_a_killed_peer_is_an_error_in_time_and_a_new_channel_works(maker: ChannelMaker) -> None:
    pool = torch.zeros(2 * CHUNK_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    for _ in range(2):
        plan, told = maker.plan(secrets.token_hex(8)), []
        with sender(plan, 2) as process:
            channel = maker.make(plan, RECEIVER, 30)

            def arrived(count: int) -> None:
                told.append(count)  # noqa: B023
                process.kill()
                pace.stall_s = 2.0  # noqa: B023 - of a message that was cut off gloo notices nothing earlier

            pace = Pace(time.monotonic() + 60, 20.0)
            with pytest.raises(ChannelBroken):
                channel.receive(pool, cargo_of([*range(2 * CHUNK_BLOCKS)], CHUNK_BLOCKS), pace, arrived)
            assert told == [CHUNK_BLOCKS] and bool((pool[:CHUNK_BLOCKS, 0] == 1).all())
            channel.close()


def test_a_hung_peer_is_an_error_after_the_time_out_and_writes_nothing_later(maker: ChannelMaker) -> None:
    """Fault 81: what arrives late must not be written into memory that has other uses by then."""
    pool = torch.zeros(2 * CHUNK_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    cargo, plan = cargo_of([*range(2 * CHUNK_BLOCKS)], CHUNK_BLOCKS), maker.plan(secrets.token_hex(8))
    pace = Pace(time.monotonic() + 60, 20.0)
    with sender(plan, 2) as process:
        assert process.pid is not None
        channel = maker.make(plan, RECEIVER, 30)

        def arrived(count: int) -> None:
            os.kill(process.pid or 0, signal.SIGSTOP)
            pace.stall_s = 0.3

        with pytest.raises(ChannelBroken, match=r"Timed out|did not get through within 0\.3 s"):
            channel.receive(pool, cargo, pace, arrived)
        channel.close()
        with pytest.raises(ChannelBroken, match="closed"):
            channel.receive(pool, cargo, unhurried(), arrived)
        pool.fill_(7)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert bool((pool == 7).all())


def test_a_receiver_that_hangs_is_an_error_after_the_time_out(ends: Ends) -> None:
    """It does not read; blocks that fill more than the kernel's buffers cannot be sent."""
    pool = torch.zeros(CHUNK_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    with pytest.raises(ChannelBroken, match=r"[Tt]imed out|did not get through within 0\.3 s"):
        ends[0].send(pool, cargo_of([*range(CHUNK_BLOCKS)], CHUNK_BLOCKS), Pace(time.monotonic() + 60, 0.3))


def test_a_peer_that_never_comes_is_an_error_after_the_time_out(maker: ChannelMaker) -> None:
    plan = maker.plan(secrets.token_hex(8))
    with pytest.raises(ChannelBroken, match=r"no channel|nobody who knows"):
        maker.make(plan, RECEIVER, 0.3)
    with pytest.raises(ChannelBroken, match="no channel"):
        maker.make(ChannelPlan("k", "127.0.0.1:1", plan.backend), SENDER, 0.3)


def test_closed_channels_leave_no_descriptors_behind(maker: ChannelMaker) -> None:
    """Both ends in one process, many times over."""
    counts = []
    for turn in range(12):
        ends = channel_pair(maker, f"turn {turn}")
        check_moved(ends, (pool_of(20, FP8, 1), pool_of(31, FP8, 2)), (SOURCES, TARGETS), 3)
        for end in ends:
            end.close()
            end.close()
        counts.append(open_files())
    assert max(counts[4:]) <= counts[3] + 2


def test_no_default_group_is_made(ends: Ends) -> None:
    """That one is tensor parallelism's."""
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_a_device_go_through_the_host(dtype: torch.dtype) -> None:
    """Over gloo, which is also what two workers of one GPU speak."""
    ends = channel_pair(ChannelMaker("127.0.0.1", torch.device("cuda"), "gloo"))
    pools = pool_of(20, dtype, 1).cuda(), pool_of(31, dtype, 2).cuda()
    move(ends, pools, (cargo_of(SOURCES, 3), cargo_of(TARGETS, 3)))
    after, source = pools[1].cpu().view(torch.uint8), pools[0].cpu().view(torch.uint8)
    assert torch.equal(after[TARGETS], source[SOURCES])
    for end in ends:
        end.close()
