"""Network namespaces on one machine: places with addresses of their own, whose links can be cut or slowed.

    our own namespace (host) --- bridge --- place, place, ...

A link is cut by a route into a black hole in the place itself: what it sends there is lost without a word, as
on a broken line. It is slowed by a token bucket. For root on Linux with `ip` and `tc`; see `possible`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvhive.proto.errors import ClusterError

_COMMAND_TIMEOUT_S = 10.0
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET
MOST_PLACES = 64


def possible() -> bool:
    """Whether this process may make namespaces here."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"kvh{secrets.token_hex(3)}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except ClusterError:
        return False
    return True


def enter(place: str) -> None:
    """Move this thread, and whoever it starts, into a place; before the process has other threads."""
    descriptor = os.open(f"/run/netns/{place}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {place}")
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Place:
    """One namespace."""

    name: str
    address: str


class PrivateNetwork:
    """Makes places and takes them away at the end, as a context manager. Calls take milliseconds."""

    def __init__(self) -> None:
        self._mark = f"kvh{secrets.token_hex(2)}"
        number = secrets.randbelow(1 << 14)
        self._subnet = f"10.{64 + (number >> 8)}.{number & 255}"
        self._places: list[Place] = []
        self.host = f"{self._subnet}.1"
        """Our own address in it."""

    def __enter__(self) -> PrivateNetwork:
        _run("ip", "link", "add", self._mark, "type", "bridge")
        _run("ip", "addr", "add", f"{self.host}/24", "dev", self._mark)
        _run("ip", "link", "set", self._mark, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self._places:  # each with its end of the line to us
            _run("ip", "netns", "del", place.name, check=False)
        _run("ip", "link", "del", self._mark, check=False)

    def place(self) -> Place:
        """Make another place, connected to all. Raises ClusterError."""
        number = len(self._places) + 2
        if number > MOST_PLACES:
            raise ClusterError(f"places: must be at most {MOST_PLACES}, is {number}")
        place = Place(f"{self._mark}-{number}", f"{self._subnet}.{number}")
        _run("ip", "netns", "add", place.name)
        self._places.append(place)
        ours = f"{self._mark}v{number}"
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", place.name)
        _run("ip", "link", "set", ours, "master", self._mark, "up")
        self._inside(place, "addr", "add", f"{place.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            self._inside(place, "link", "set", link, "up")
        return place

    def cut(self, place: Place, addresses: Sequence[str]) -> None:
        """Lose all that a place sends to these addresses."""
        for address in addresses:
            self._inside(place, "route", "add", "blackhole", f"{address}/32")

    def slow(self, place: Place, kbit_per_s: int) -> None:
        """Let a place send so much, and queue what a second of it can hold."""
        bucket = ("rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "1000ms")
        _run("tc", "-n", place.name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)

    def mend(self, place: Place) -> None:
        """Undo all that was done to a place's links."""
        _run("ip", "-n", place.name, "route", "flush", "type", "blackhole", check=False)
        _run("tc", "-n", place.name, "qdisc", "del", "dev", "eth0", "root", check=False)

    def _inside(self, place: Place, *arguments: str) -> None:
        _run("ip", "-n", place.name, *arguments)


def command_inside(place: Place | None, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in a place; without one, the command itself."""
    return list(command) if place is None else ["ip", "netns", "exec", place.name, *command]


def _run(*command: str, check: bool = True) -> None:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(command)}: {error}") from error
    if check and done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def left_over() -> list[str]:
    """Return the names of places that exist, ours of other runs included."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
