"""A cluster with API keys: its commands work, strangers get nowhere, and no port runs what it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvhive.scripts.owned_processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LONG = "The library is open from nine to five on all days but Sunday. " * 8


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_commands_and_clients_get_in_by_their_keys_and_share_no_cache(keyed_cluster: Any) -> None:
    kvhive, keys = keyed_cluster.kvhive, keyed_cluster.keys
    status = json.loads(kvhive("status", "--json").stdout)
    assert [worker["state"] for worker in status["workers"]] == ["serving"] * 2
    url = status["endpoints"]["http"]
    assert httpx.get(f"{url}/healthz").status_code == 200
    for path in ("/readyz", "/metrics", "/v1/models"):
        assert httpx.get(f"{url}{path}").status_code == 401
    assert httpx.get(f"{url}/metrics", headers=bearer(keys["alice"])).status_code == 403
    assert "kvhive_api_keys 3.0" in httpx.get(f"{url}/metrics", headers=bearer(keys["root"])).text

    def cached(**environment: str) -> int:
        kvhive.extra.clear()
        kvhive.extra.update(environment)
        answer = json.loads(kvhive("chat", "--json", "--max-tokens", "1", "--system", LONG, "Hello").stdout)
        return int(answer["usage"]["cached_tokens"])

    alice, bob = {"KVHIVE_API_KEY": keys["alice"]}, {"KVHIVE_API_KEY": keys["bob"]}
    assert [cached(), cached(**alice), cached(**bob)] == [0, 0, 0]
    assert all(hit > 50 for hit in (cached(), cached(**alice), cached(**bob)))
    kvhive.extra.clear()
    kvhive("keys", "revoke", "bob")
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/v1/models", headers=bearer(keys["bob"])).status_code != 401:
        assert time.monotonic() < deadline, "a revoked key is still let in"
        time.sleep(0.1)
    assert httpx.get(f"{url}/v1/models", headers=bearer(keys["alice"])).status_code == 200


class Canary:
    """What runs when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def listening(pids: set[int]) -> dict[tuple[str, int], int]:
    """Return the pid by (address in hex, port) of each TCP socket that processes listen on."""
    inodes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes[os.readlink(fd)] = pid
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            pid = inodes.get(f"socket:[{columns[9]}]")
            if columns[3] == "0A" and pid is not None:
                address, _, port = columns[1].partition(":")
                found[address, int(port, 16)] = pid
    return found


def is_loopback(address: str) -> bool:
    """Of an address as the kernel's tables have it: ::1, or 127.0.0.0/8 as such or within IPv6."""
    prefix = address[:-8]
    within = prefix in ("", "0000000000000000FFFF0000") and address.endswith("7F")
    return within or address == "00000000000000000000000001000000"


def test_ports_of_ours_are_on_loopback_and_run_nothing_that_they_are_sent(
    keyed_cluster: Any, tmp_path: Path
) -> None:
    """Fault 106. Ray's own ports, which it opens on all interfaces, are sent the same."""
    kvhive = keyed_cluster.kvhive
    state = kvhive.state()
    ports = listening({process.pid for process in processes_of(Path(state["runtime_dir"]))})
    exposed = {port for address, port in ports if not is_loopback(address)}
    # The controller and the workers have Ray in their process, which opens a port of its own there.
    ours = {state[part]["pid"] for part in ("router", "redis", "supervisor")}
    assert not exposed & {port for (_, port), pid in ports.items() if pid in ours}
    doors = {int(state[door].rpartition(":")[2]) for door in ("grpc", "http")}
    workers = json.loads(kvhive("status", "--json").stdout)["workers"]
    addresses = {worker["address"] for worker in workers}
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    known = doors | {int(address.rpartition(":")[2]) for address in addresses}
    assert known <= {port for _, port in ports} and not known & exposed
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    for _, port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as sent:
            sent.sendall(canary)
            sent.settimeout(0.2)
            sent.recv(1000)
    time.sleep(0.5)
    assert not (tmp_path / "canary").exists()
    assert (
        json.loads(kvhive("chat", "--json", "--max-tokens", "1", "Hello").stdout)["finish_reason"] == "length"
    )
