"""The two ends of a tcp channel find each other, whoever else knocks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvhive.worker.transfer_channel import ChannelBroken
from kvhive.worker.transfer_meeting import MAX_SILENT, accept, connect
from kvhive.worker.transfer_pace import TransferStopped

KEY = "a.1-b.2-nonce"
Receiver = tuple["Blackboard", Callable[[], socket.socket]]


class Blackboard:
    """A store that both ends see."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._told = threading.Event()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        self._told.set()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        assert self._told.wait(20)
        return self._values[key].encode()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.get("address").decode().rpartition(":")
        return host, int(port)


@contextmanager
def accepting(
    host: str = "127.0.0.1", timeout_s: float = 20.0, stopped: threading.Event | None = None
) -> Iterator[Receiver]:
    """Accept in a thread; yield the store, and what waits for who was accepted."""
    store, made = Blackboard(), []

    def work() -> None:
        try:
            made.append(accept(store, KEY, host, timeout_s, stopped or threading.Event()))
        except (ChannelBroken, TransferStopped) as error:
            made.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def result() -> socket.socket:
        thread.join(30)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    try:
        yield store, result
    finally:
        thread.join(30)
        for each in made:
            if isinstance(each, socket.socket):
                each.close()


def check_joined(sender: socket.socket, receiver: socket.socket) -> None:
    sender.sendall(b"hello")
    assert receiver.recv(100) == b"hello", "all that follows the greeting, and nothing else"
    sender.close()
    assert receiver.recv(100) == b""


def hung_up_on(guest: socket.socket) -> bool:
    guest.settimeout(10)
    try:
        return guest.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_ends_meet_and_the_door_is_closed_behind_them(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with accepting(host) as (store, result):
        sender = connect(store, KEY, 20.0, threading.Event())
        receiver = result()
        receiver.settimeout(20)
        check_joined(sender, receiver)
        with pytest.raises(OSError):
            socket.create_connection(store.address, 5)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_strangers_are_hung_up_on_and_silent_ones_keep_nobody_waiting() -> None:
    with accepting() as (store, result):
        wrong, short = (socket.create_connection(store.address, 5) for _ in range(2))
        wrong.sendall(b"x" * 32)
        short.sendall(b"x")
        short.shutdown(socket.SHUT_WR)
        assert hung_up_on(wrong) and hung_up_on(short)
        silent = [socket.create_connection(store.address, 5) for _ in range(2 * MAX_SILENT)]
        assert hung_up_on(silent[0]), "no more than so many are kept"
        began = time.monotonic()
        sender = connect(store, KEY, 20.0, threading.Event())
        receiver = result()
        assert time.monotonic() - began < 10
        receiver.settimeout(20)
        check_joined(sender, receiver)
        assert all(hung_up_on(each) for each in silent)
        for each in (wrong, short, *silent):
            each.close()


def test_who_knows_another_channel_s_key_is_a_stranger_and_the_sender_hears_of_it() -> None:
    with accepting(timeout_s=1.0) as (store, result):
        other = connect(store, KEY + "x", 20.0, threading.Event())
        assert hung_up_on(other)
        other.close()
        with pytest.raises(ChannelBroken, match="nobody who knows the channel's key came in time"):
            result()


def test_a_meeting_that_nobody_wants_any_more_ends_at_once_on_either_side() -> None:
    """Else the pair's next pull would wait for it until its time is over."""
    stopped = threading.Event()
    threading.Timer(0.1, stopped.set).start()
    began = time.monotonic()
    with (
        accepting(timeout_s=60.0, stopped=stopped) as (_, result),
        pytest.raises(TransferStopped, match="cancelled"),
    ):
        result()
    with pytest.raises(TransferStopped, match="cancelled"):
        connect(Blackboard(), KEY, 60.0, stopped)
    assert time.monotonic() - began < 20


def test_a_receiver_that_does_not_come_is_an_error_after_the_time_out() -> None:
    with pytest.raises(ChannelBroken, match="the receiver did not come in time"):
        connect(Blackboard(), KEY, 0.1, threading.Event())


def test_nobody_at_the_address_is_an_error_that_names_it() -> None:
    store = Blackboard()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        host, port = closed.getsockname()
        store.set("address", f"{host}:{port}")
        with pytest.raises(ChannelBroken, match=f"no connection to {host}:{port}: "):
            connect(store, KEY, 5.0, threading.Event())


def test_a_host_that_is_not_ours_is_an_error_that_names_it() -> None:
    with pytest.raises(ChannelBroken, match=r"cannot listen on 192\.0\.2\.1: "):
        accept(Blackboard(), KEY, "192.0.2.1", 5.0, threading.Event())
