"""Which backends a worker speaks, and the stores in which both ends of its channels meet."""

from __future__ import annotations

import threading

import pytest
import torch
from channel_peer import local_maker

from kvhive.proto.errors import ConfigError
from kvhive.worker import transfer_maker
from kvhive.worker.transfer_channel import RECEIVER, SENDER, Channel
from kvhive.worker.transfer_group import GroupChannel
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_socket import SocketChannel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_worker_speaks_what_its_device_can_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ChannelMaker("127.0.0.1", CPU).backends() == ["tcp", "gloo"]
    assert ChannelMaker("127.0.0.1", CPU, "gloo").backends() == ["gloo"]
    monkeypatch.setattr(transfer_maker, "has_nccl", lambda: True)
    assert ChannelMaker("127.0.0.1", CUDA).backends() == ["nccl", "gloo"]
    assert ChannelMaker("127.0.0.1", CUDA, "nccl").backends() == ["nccl"]
    monkeypatch.setattr(transfer_maker, "has_nccl", lambda: False)
    assert ChannelMaker("127.0.0.1", CUDA).backends() == ["gloo"]


@pytest.mark.parametrize(
    ("device", "backend", "able"), [(CPU, "nccl", "tcp, gloo"), (CUDA, "tcp", "gloo"), (CUDA, "nccl", "gloo")]
)
def test_a_backend_that_the_device_cannot_speak_is_refused_by_name(
    device: torch.device, backend: str, able: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_maker, "has_nccl", lambda: False)
    message = rf"^workers\.transfer\.backend: must be one of auto, {able} for a pool on {device.type}, is "
    with pytest.raises(ConfigError, match=f"{message}'{backend}'$"):
        ChannelMaker("127.0.0.1", device, backend)


@pytest.mark.parametrize(("backend", "kind"), [("auto", SocketChannel), ("gloo", GroupChannel)])
def test_a_store_is_replaced_before_it_grows_and_serves_who_is_on_the_way(
    backend: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_maker, "CHANNELS_PER_STORE", 2)
    maker = local_maker(backend)
    plans = [maker.plan(f"k{i}") for i in range(5)]
    assert [plan.store for plan in plans[0::2]] != [plans[0].store] * 3
    assert plans[0].store == plans[1].store and plans[2].store == plans[3].store
    assert len(maker._stores) == 2
    other: list[Channel] = []
    thread = threading.Thread(target=lambda: other.append(maker.make(plans[3], SENDER, 20)))
    thread.start()
    receiver = maker.make(plans[3], RECEIVER, 20)
    thread.join()
    assert isinstance(receiver, kind) and isinstance(other[0], kind)
    receiver.close()
    other[0].close()
