"""A channel between two processes: what arrives, what a dead or hung peer is, and what is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time

import pytest
import torch
from channel_peer import open_files, sender

from kvhive.worker import transfer_channel
from kvhive.worker.transfer_channel import (
    RECEIVER,
    SENDER,
    ChannelBroken,
    ChannelMaker,
    ChannelPlan,
    PairChannel,
)

MEGA = 2**20


@pytest.fixture(scope="module")
def maker() -> ChannelMaker:
    return ChannelMaker("127.0.0.1", torch.device("cpu"))


def receive(channel: PairChannel, size: int, timeout_s: float = 20.0) -> torch.Tensor:
    buffer = torch.zeros(size, dtype=torch.uint8)
    channel.wait(channel.begin([buffer]), timeout_s)
    return buffer


def plan_of(maker: ChannelMaker) -> ChannelPlan:
    return maker.plan(secrets.token_hex(8))


def test_messages_arrive_whole_and_in_order(maker: ChannelMaker) -> None:
    plan = plan_of(maker)
    sizes = [1, 3 * MEGA, 17, MEGA]
    with sender(plan, sizes):
        channel = maker.make(plan, RECEIVER, 30)
        for size in sizes:
            assert bool((receive(channel, size) == 1).all())
        channel.close()


def test_a_killed_peer_is_an_error_in_time_and_a_new_channel_works(maker: ChannelMaker) -> None:
    for _ in range(2):
        plan = plan_of(maker)
        with sender(plan, [8, 100 * MEGA]) as (process, _told):
            channel = maker.make(plan, RECEIVER, 30)
            receive(channel, 8)
            works = channel.begin([torch.zeros(100 * MEGA, dtype=torch.uint8)])
            process.kill()
            with pytest.raises(ChannelBroken):
                channel.wait(works, 1.5)  # in the middle of a message gloo notices nothing earlier
            channel.close()


def test_a_hung_peer_is_an_error_after_the_time_out_and_writes_nothing_later(maker: ChannelMaker) -> None:
    """Fault 81: what arrives late must not be written into memory that has other uses by then."""
    plan = plan_of(maker)
    with sender(plan, [8, 64 * MEGA]) as (process, _told):
        assert process.pid is not None
        channel = maker.make(plan, RECEIVER, 30)
        receive(channel, 8)
        os.kill(process.pid, signal.SIGSTOP)
        buffer = torch.zeros(64 * MEGA, dtype=torch.uint8)
        works = channel.begin([buffer])
        with pytest.raises(ChannelBroken, match="Timed out"):
            channel.wait(works, 0.3)
        assert works == []
        channel.close()
        with pytest.raises(ChannelBroken, match="closed"):
            channel.begin([buffer])
        buffer.fill_(7)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert bool((buffer == 7).all())


def test_a_peer_that_never_comes_is_an_error_after_the_time_out(maker: ChannelMaker) -> None:
    with pytest.raises(ChannelBroken, match="no channel"):
        maker.make(plan_of(maker), RECEIVER, 0.3)
    with pytest.raises(ChannelBroken, match="no channel"):
        maker.make(ChannelPlan("k", "127.0.0.1:1"), SENDER, 0.3)


def test_closed_channels_leave_no_descriptors_behind(maker: ChannelMaker) -> None:
    """Both ends in one process, many times over."""
    counts = []
    for _ in range(12):
        plan = plan_of(maker)
        other: list[PairChannel] = []
        thread = threading.Thread(target=lambda: other.append(maker.make(plan, SENDER, 20)))  # noqa: B023
        thread.start()
        channel = maker.make(plan, RECEIVER, 20)
        thread.join()
        works = other[0].begin([torch.ones(5, dtype=torch.uint8)])
        assert receive(channel, 5).tolist() == [1] * 5
        other[0].wait(works, 5.0)
        for end in (channel, *other):
            end.close()
            end.close()
        counts.append(open_files())
    assert max(counts[4:]) <= counts[3] + 2


def test_a_store_is_replaced_before_it_grows_and_serves_who_is_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_channel, "CHANNELS_PER_STORE", 2)
    maker = ChannelMaker("127.0.0.1", torch.device("cpu"))
    plans = [maker.plan(f"k{i}") for i in range(5)]
    assert [plan.store for plan in plans[0::2]] != [plans[0].store] * 3
    assert plans[0].store == plans[1].store and plans[2].store == plans[3].store
    assert len(maker._stores) == 2
    other: list[PairChannel] = []
    thread = threading.Thread(target=lambda: other.append(maker.make(plans[3], SENDER, 20)))
    thread.start()
    maker.make(plans[3], RECEIVER, 20).close()
    thread.join()
    other[0].close()


def test_no_default_group_is_made(maker: ChannelMaker) -> None:
    """That one is tensor parallelism's."""
    plan = plan_of(maker)
    with sender(plan, [1]):
        channel = maker.make(plan, RECEIVER, 30)
        receive(channel, 1)
        assert not torch.distributed.is_initialized()
        channel.close()
