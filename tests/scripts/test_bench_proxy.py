"""kvhive bench proxy: it runs, beside another router too, and measures the same work of each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhive.proto.errors import ConfigError
from kvhive.scripts import bench_proxy, bench_proxy_stub
from kvhive.scripts.bench_proxy import Peer, cpu_s, parse_peer, prompt_text


@pytest.fixture
def stub_port() -> Iterator[int]:
    """An OpenAI-compatible stub, which is its own router here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, bench_proxy_stub.__file__, str(port)])
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    yield port
    process.kill()
    process.wait()


def test_prompts_are_of_one_size_and_share_what_they_say() -> None:
    texts = [prompt_text(number) for number in range(130)]
    assert {len(text) for text in texts} == {4096} and len(set(texts)) == 130
    assert texts[0][:3072] == texts[64][:3072] != texts[1][:3072]


def test_a_quick_run_beside_another(stub_port: int) -> None:
    peer = f"other=http://127.0.0.1:{stub_port},{os.getpid()}"
    command = [sys.executable, "-P", "-m", "kvhive.scripts.cli", "bench", "proxy", "--quick", "--rounds", "1"]
    outcome = subprocess.run([*command, "--json", "--peer", peer], capture_output=True, timeout=200)
    assert outcome.returncode == 0, outcome.stderr.decode()
    found = json.loads(outcome.stdout)
    assert set(found["per token"]) == {"completions", "chat", "grpc"}
    assert set(found["per request"]) == {"worker, straight", "kvhive, the same", "kvhive", "other"}
    for figures in found["per request"].values():
        assert figures["first_ms"] > 0
    assert found["per request"]["kvhive"]["requests_s"] > 0


@pytest.mark.parametrize(
    "text",
    ["", "x", "x=http://h:1", "x=ftp://h:1,2", "x=http://h:1,two", "=http://h:1,2", "x=http://h:1,2,m,n"],
)
def test_a_peer_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--peer: must be NAME=http://HOST:PORT,PID"):
        parse_peer(text)


def test_a_peer() -> None:
    assert parse_peer("a=http://h:1/,22") == Peer("a", "http://h:1", 22, "stub")
    assert parse_peer("a=http://h:1,22,m/x") == Peer("a", "http://h:1", 22, "m/x")


def test_cpu_is_that_of_the_whole_family() -> None:
    before = cpu_s(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_s(os.getpid()) - before >= 0.25
        child.kill()
    absent = int(Path("/proc/sys/kernel/pid_max").read_text())
    with pytest.raises(ConfigError, match=f"no process {absent}"):
        bench_proxy.cpu_s(absent)
