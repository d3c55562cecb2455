"""How the two ends of a tcp channel find each other, among whoever else connects.

The receiver listens, and tells where in the store that both meet in; the sender connects and says a digest of
the channel's key. Who says something else is hung up on, and who says nothing keeps nobody waiting. A meeting
that nobody wants any more ends within LOOK_S, so that the next pull need not wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from kvhive.worker.transfer_channel import ChannelBroken
from kvhive.worker.transfer_pace import TransferStopped

SEND_BUFFER_BYTES = 2**20
"""How far the sender may be ahead of the receiver: that much stays in the caches on its way. The receiver's
buffer is left to the kernel, which sees the network's delay."""

MAX_SILENT = 16
"""Connections that may be open without having said whose they are; one more, and the oldest goes."""

LOOK_S = 0.05
"""How often either end looks whether it is still wanted."""

_SOON_S = 0.001
_BACKLOG = 64
_ADDRESS = "address"


class Store(Protocol):
    """What is needed of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Set it for both."""

    def check(self, keys: list[str]) -> bool:
        """Whether they are set. Raises RuntimeError when the store is gone."""

    def get(self, key: str) -> bytes:
        """Return what it is set to."""


def connect(store: Store, key: str, timeout_s: float, stopped: threading.Event) -> socket.socket:
    """Meet the receiver, as the sender. Raises ChannelBroken, TransferStopped, and as the store does."""
    deadline = time.monotonic() + timeout_s
    host, port = _address(store, deadline, stopped)
    connection = socket.socket(_family(host))
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.connect((host, port))
        connection.sendall(_greeting(key))
    except OSError as error:
        connection.close()
        raise ChannelBroken(f"no connection to {host}:{port}: {error}") from None
    return connection


def accept(store: Store, key: str, host: str, timeout_s: float, stopped: threading.Event) -> socket.socket:
    """Meet the sender, as the receiver, on an address of this worker. Raises as `connect` does."""
    deadline = time.monotonic() + timeout_s
    try:
        with listen(host) as listener:
            store.set(_ADDRESS, f"{host}:{listener.getsockname()[1]}")
            return _await_sender(listener, _greeting(key), deadline, stopped)
    except OSError as error:
        raise ChannelBroken(f"cannot listen on {host}: {error}") from None


def listen(host: str) -> socket.socket:
    """Listen on one address, on a port that was free."""
    listener = socket.socket(_family(host))
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _address(store: Store, deadline: float, stopped: threading.Event) -> tuple[str, int]:
    """Return where the receiver listens, once it does."""
    pause_s = _SOON_S
    while not store.check([_ADDRESS]):
        if stopped.wait(pause_s):
            raise TransferStopped("cancelled")
        if time.monotonic() > deadline:
            raise ChannelBroken("the receiver did not come in time")
        pause_s = min(2 * pause_s, LOOK_S)
    host, _, port = store.get(_ADDRESS).decode().rpartition(":")
    return host, int(port)


def _await_sender(
    listener: socket.socket, greeting: bytes, deadline: float, stopped: threading.Event
) -> socket.socket:
    """Return the connection of who knows the greeting."""
    heard: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            if stopped.is_set():
                raise TransferStopped("cancelled")
            for ready in _readable([listener, *heard], min(left_s, LOOK_S)):
                if ready is listener:
                    _let_in(listener, heard)
                elif ready in heard:
                    said = _hear(ready, len(greeting) - len(heard[ready]))
                    heard[ready] += said
                    if hmac.compare_digest(heard[ready], greeting):
                        del heard[ready]
                        return ready
                    if not said or len(heard[ready]) == len(greeting):
                        del heard[ready]
                        ready.close()
        raise ChannelBroken("nobody who knows the channel's key came in time")
    finally:
        for stranger in heard:
            stranger.close()


def _let_in(listener: socket.socket, heard: dict[socket.socket, bytes]) -> None:
    with suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
        guest, _ = listener.accept()
        guest.setblocking(False)
        heard[guest] = b""
    if len(heard) > MAX_SILENT:
        oldest = next(iter(heard))
        del heard[oldest]
        oldest.close()


def _hear(guest: socket.socket, nbytes: int) -> bytes:
    """Return what somebody says, no more than that many bytes; nothing when he hangs up, or is lost."""
    try:
        return guest.recv(nbytes)
    except OSError:
        return b""


def _readable(sockets: Iterable[socket.socket], timeout_s: float) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        names = {each.fileno(): each for each in sockets}
        for number in names:
            selector.register(number, selectors.EVENT_READ)
        return [names[key.fd] for key, _ in selector.select(timeout_s)]


def _greeting(key: str) -> bytes:
    """Return what the sender says, of one length for every key."""
    return hashlib.sha256(key.encode()).digest()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
