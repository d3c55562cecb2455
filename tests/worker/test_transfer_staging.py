"""Blocks through messages: straight or by staging buffers, whatever the numbers are; and seals."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvhive.kernels.fp8_cache import FP8
from kvhive.proto.block_hash import BlockHash
from kvhive.worker import transfer_staging
from kvhive.worker.transfer_cargo import Cargo, cut, fits, runs
from kvhive.worker.transfer_channel import RECEIVER, SENDER, ChannelBroken, ChannelMaker, PairChannel
from kvhive.worker.transfer_staging import Staging
from kvhive.worker.transfer_stream import Pace, TransferStopped, receive, send

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


STAGED, STRAIGHT = [3, 3, 3, 2], [1] * 11


def cargo_of(
    blocks: list[int], messages: list[int], hashes: list[BlockHash] = HASHES, nonce: bytes = b"n" * 16
) -> Cargo:
    return Cargo(nonce, hashes, blocks, 3, messages)


def move(
    pools: tuple[torch.Tensor, torch.Tensor],
    sent: Cargo,
    expected: Cargo,
    stopped: threading.Event | None = None,
) -> list[int]:
    """Send and receive in two threads; return what was told to have arrived. Raises the receiver's error."""
    source, target = channel_pair(ChannelMaker("127.0.0.1", torch.device("cpu")))
    told: list[int] = []

    def sending() -> None:
        with contextlib.suppress(ChannelBroken):  # when the receiver has given up
            send(source, Staging(pools[0], 3, True), sent, Pace(time.monotonic() + 20, 3.0))

    thread = threading.Thread(target=sending)
    thread.start()
    try:
        pace = Pace(time.monotonic() + 20, 20.0, stopped or threading.Event())
        receive(target, Staging(pools[1], 3, True), expected, pace, told.append)
    finally:
        target.close()
        thread.join(30)
        source.close()
    return told


@pytest.mark.parametrize("messages", [STAGED, STRAIGHT], ids=["staged", "straight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_comes_to_its_place_and_no_other_is_touched(
    messages: list[int], dtype: torch.dtype
) -> None:
    pools = pool_of(20, dtype, 1), pool_of(31, dtype, 2)
    before = pools[1].view(torch.uint8).clone()
    assert move(pools, cargo_of(SOURCES, messages), cargo_of(TARGETS, messages)) == [3, 6, 9, 11]
    after, source = pools[1].view(torch.uint8), pools[0].view(torch.uint8)
    assert torch.equal(after[TARGETS], source[SOURCES])
    others = [block for block in range(31) if block not in TARGETS]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("messages", [STAGED, STRAIGHT], ids=["staged", "straight"])
@pytest.mark.parametrize("what", ["nonce", "hash"])
def test_blocks_under_another_seal_are_not_taken_for_arrived(messages: list[int], what: str) -> None:
    """The second chunk's seal is the first that differs."""
    other = [*HASHES[:4], BlockHash(b"x" * 32), *HASHES[5:]]
    sent = cargo_of(SOURCES, messages, other)
    if what == "nonce":
        sent = cargo_of(SOURCES, messages, nonce=b"m" * 16)
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    number = 0 if what == "nonce" else 1
    with pytest.raises(ChannelBroken, match=f"chunk {number} has another seal"):
        move(pools, sent, cargo_of(TARGETS, messages))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 10, 11]),  # rows on both sides
        ([9, 8, 7, 6, 5, 4], [1, 2, 3, 9, 10, 11]),  # rows on one
    ],
)
def test_rows_of_blocks_go_as_one_message(source: list[int], target: list[int]) -> None:
    messages = cut(source, runs(target), 4, 2**20)
    pools = pool_of(20, torch.int32, 1), pool_of(31, torch.int32, 2)
    sent = Cargo(b"n" * 16, HASHES[:6], source, 4, messages)
    assert move(pools, sent, Cargo(b"n" * 16, HASHES[:6], target, 4, messages)) == [4, 6]
    assert torch.equal(pools[1][target], pools[0][source])


def test_rows_end_where_either_side_s_row_or_a_chunk_does() -> None:
    mega = 2**20
    assert runs([4, 5, 6, 2, 9, 10]) == [3, 1, 2]
    assert runs([]) == []
    assert cut([4, 5, 6, 7, 8, 9], [6], 4, mega) == [4, 2]
    assert cut([4, 5, 6, 7, 8, 9], [2, 4], 4, mega) == [2, 2, 2]
    assert cut([4, 5, 6, 2, 3, 9], [6], 100, mega) == [3, 2, 1]
    assert cut([4, 5, 6, 2, 3, 9], [9], 100, mega) == [3, 2, 1], "the asker wants more than there is"
    assert cut([4, 2, 6, 0, 3, 9], [6], 4, 1024) == [4, 2], "too small to travel by themselves"


def test_messages_are_rows_of_one_side_where_only_that_one_has_any() -> None:
    kilo, scattered = 2**10, list(range(0, 2048, 2))
    assert cut(scattered, [1] * 1024, 512, 16 * kilo) == [512] * 2
    assert cut(scattered, [100, 924], 512, 16 * kilo) == [100, 412, 512]
    assert cut([*range(64), *range(100, 164)], [1] * 128, 512, 16 * kilo) == [64, 64]


@pytest.mark.parametrize("which", [0, 1])
def test_a_side_whose_blocks_lie_in_a_row_copies_nothing(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_staging.Staging, ("gather_blocks", "scatter_blocks")[which][:-7], None)
    rows, scattered = list(range(3, 14)), [9, 1, 19, 4, 6, 15, 3, 12, 17, 0, 8]
    source, target = (rows, scattered) if which == 0 else (scattered, rows)
    pools = pool_of(20, torch.int32, 1), pool_of(20, torch.int32, 2)
    cargoes = cargo_of(source, STAGED), cargo_of(target, STAGED)
    assert move(pools, *cargoes) == [3, 6, 9, 11]
    assert torch.equal(pools[1][target], pools[0][source])


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True),
    st.lists(st.integers(0, 40), min_size=30, max_size=40, unique=True),
    st.integers(1, 9),
    st.sampled_from([1, 2**17, 2**20]),
)
def test_both_sides_can_do_with_every_cut(
    source: list[int], target: list[int], chunk_blocks: int, block_bytes: int
) -> None:
    target = target[: len(source)]
    messages = cut(source, runs(target), chunk_blocks, block_bytes)
    assert fits(messages, len(source), chunk_blocks)
    hashes = [BlockHash(bytes(32))] * len(source)
    sides = [Cargo(b"", hashes, blocks, chunk_blocks, messages) for blocks in (source, target)]
    chunks = sides[0].chunks
    assert [place for each in chunks for place in each.chunk] == list(range(len(source)))
    for each in chunks:
        assert [place for part in each.parts for place in part] == list(each.chunk)
    if block_bytes == 2**20:
        assert all(side.in_rows for side in sides)


@pytest.mark.parametrize(
    ("messages", "whether"),
    [([4, 2], True), ([1] * 6, True), ([4, 1], False), ([3, 3], False), ([4, 3], False), ([4, 0, 2], False)],
)
def test_messages_that_are_no_cut_are_found_out(messages: list[int], whether: bool) -> None:
    assert fits(messages, 6, 4) == whether


def test_a_transfer_that_nobody_wants_stops_between_two_chunks() -> None:
    stopped = threading.Event()
    stopped.set()
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    with pytest.raises(TransferStopped, match="cancelled"):
        move(pools, cargo_of(SOURCES, STRAIGHT), cargo_of(TARGETS, STRAIGHT), stopped)


def test_who_hangs_up_with_everything_in_hand_breaks_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's call ends when it has all, which the sending thread may learn a little later."""
    source, target = channel_pair(ChannelMaker("127.0.0.1", torch.device("cpu")))
    pools = pool_of(20, torch.float32, 1), pool_of(31, torch.float32, 2)
    pace = Pace(time.monotonic() + 20, 20.0)
    begin, begun = source.begin, []

    def begin_and_hear(messages: list[torch.Tensor]) -> list[object]:
        begun.append(len(messages))
        works = begin(messages)
        if len(begun) == 8:  # four chunks and their seals
            pace.stopped.set()
        return works

    monkeypatch.setattr(source, "begin", begin_and_hear)
    thread = threading.Thread(
        target=receive,
        args=(
            target,
            Staging(pools[1], 3, True),
            cargo_of(TARGETS, STRAIGHT),
            Pace(time.monotonic() + 20, 20.0),
            lambda count: None,
        ),
    )
    thread.start()
    send(source, Staging(pools[0], 3, True), cargo_of(SOURCES, STRAIGHT), pace)
    thread.join(30)
    assert torch.equal(pools[1].view(torch.uint8)[TARGETS], pools[0].view(torch.uint8)[SOURCES])
    source.close()
    target.close()


def test_time_runs_out() -> None:
    pace = Pace(time.monotonic() - 0.1, 1.0)
    with pytest.raises(TransferStopped, match="out of time"):
        pace.next_limit()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_a_device_go_through_the_host(dtype: torch.dtype) -> None:
    """Over gloo, which is also what two workers of one GPU speak."""
    pools = pool_of(20, dtype, 1).cuda(), pool_of(31, dtype, 2).cuda()
    assert move(pools, cargo_of(SOURCES, STAGED), cargo_of(TARGETS, STAGED))[-1] == 11
    after, source = pools[1].cpu().view(torch.uint8), pools[0].cpu().view(torch.uint8)
    assert torch.equal(after[TARGETS], source[SOURCES])
