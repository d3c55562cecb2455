"""`kvhive up` ends in a cluster that serves or in nothing; `kvhive down` leaves nothing.

A start takes half a minute: tests that only ask share the session's cluster, and each start of its own
answers several questions.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference import Client, Result, by_tokens

from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, end_processes, processes_of
from kvhive.scripts.ray_head import head_environment, start_head

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

TWO_CPU_WORKERS = (
    *("--set", "workers.device=cpu", "--set", "workers.count=2", "--set", "workers.threads=1"),
    *("--set", "model.dtype=float32"),
)
ONE_CPU_WORKER = ("--set", "workers.device=cpu", "--set", "workers.count=1", "--set", "workers.threads=1")
UP_TIMEOUT_S = 170
STREAM_TOKENS = 150
"""Several seconds of output: more than a router gives by default when it is told to stop."""


def eventually(check: Any, within_s: float, every_s: float = 0.1) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        found = check()
        if found or time.monotonic() > deadline:
            return found
        time.sleep(every_s)


def is_open(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition("/")[2].rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def assert_nothing_left(state: dict[str, Any], state_dir: Path) -> None:
    runtime_dir = Path(state["runtime_dir"])
    assert processes_of(runtime_dir) == []
    assert not runtime_dir.exists()
    assert list(state_dir.iterdir()) == []
    for endpoint in (state["grpc"], state["http"], (state["ray"] or {}).get("address")):
        assert not endpoint or not is_open(endpoint)


def test_status_lists_serving_workers_whose_blocks_add_up(cluster: Any) -> None:
    status = cluster.status()
    assert status["endpoints"] == {"grpc": cluster.grpc, "http": cluster.http}
    assert [worker["id"] for worker in status["workers"]] == ["w1", "w2"]
    for worker in status["workers"]:
        blocks = worker["blocks"]
        assert worker["state"] == "serving" and worker["epoch"] > 0
        assert blocks["live"] + blocks["cached"] + blocks["free"] == blocks["total"] == 1024


def test_generate_streams_text_and_says_what_the_cache_did(cluster: Any) -> None:
    result = cluster.kvhive("generate", "--max-tokens", "5", "The capital of France is")
    assert "Paris" in result.stdout
    assert "prompt 5 tokens" in result.stderr and "TTFT" in result.stderr


def test_a_repeated_long_prompt_is_cached_and_answers_alike(cluster: Any) -> None:
    prompt = "The harbour library lends maps, books and films to everybody. " * 20
    arguments = ("generate", "--json", "--max-tokens", "8", "--cache-salt", os.urandom(8).hex(), prompt)
    first, second = (json.loads(cluster.kvhive(*arguments).stdout) for _ in range(2))
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] >= 0.8 * second["usage"]["prompt_tokens"]
    assert second["usage"]["worker_id"] == first["usage"]["worker_id"]
    assert second["text"] == first["text"]


def test_chat_answers_one_message(cluster: Any) -> None:
    result = cluster.kvhive("chat", "--max-tokens", "12", "--system", "Answer briefly.", "What is 1+1?")
    assert result.stdout.strip()


def test_a_bad_request_is_one_line_with_the_field(cluster: Any) -> None:
    result = cluster.kvhive("generate", "--max-tokens", "0", "x", check=False)
    assert result.returncode == 1
    assert "max_tokens" in result.stderr and result.stderr.count("\n") == 1


def test_a_second_up_says_that_it_is_up_and_starts_nothing(cluster: Any) -> None:
    before = cluster.status()
    assert "already up" in cluster.kvhive("up", *TWO_CPU_WORKERS).stdout
    other = cluster.kvhive("up", *TWO_CPU_WORKERS, "--set", "workers.count=3", check=False)
    assert other.returncode == 1
    assert (
        "already up with another workers.count (2, not 3)" in other.stderr and other.stderr.count("\n") == 1
    )
    after = cluster.status()
    assert [worker["epoch"] for worker in after["workers"]] == [
        worker["epoch"] for worker in before["workers"]
    ]
    assert after["router"] == before["router"]


def test_every_process_of_a_cluster_is_known_as_its_own(cluster: Any) -> None:
    state = cluster.kvhive.state()
    ours = {process.pid for process in processes_of(Path(state["runtime_dir"]))}
    workers = {worker["pid"] for worker in cluster.status()["workers"]}
    assert workers | {state["router"]["pid"], state["redis"]["pid"], state["ray"]["head"]["pid"]} <= ours
    assert RUNTIME_DIR_VARIABLE not in os.environ


def test_the_demo_ends_well_because_every_later_question_hits(cluster: Any) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "kvhive.scripts.demo"],
        env=cluster.kvhive.environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 of 4 later requests hit the shared prefix" in result.stdout
    assert "cached 0" in result.stdout


@contextlib.contextmanager
def bystanders(runtime_dir: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What an operator may have open: a pager on a log, and a shell inside the runtime directory."""
    commands = (["tail", "-f", str(runtime_dir / "router.log")], ["sh", "-c", "sleep 300; true"])
    running = [
        subprocess.Popen(command, cwd=runtime_dir, stdout=subprocess.DEVNULL, start_new_session=True)
        for command in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def test_down_lets_streams_end_and_leaves_no_process_port_or_file_of_ours(ending_cluster: Any) -> None:
    """What is not ours survives; a second `down` finds nothing. The cluster has been through all tests."""
    kvhive, state = ending_cluster.kvhive, ending_cluster.kvhive.state()
    assert is_open(state["grpc"]) and is_open(state["http"])
    with bystanders(Path(state["runtime_dir"])) as others:
        async with Client(state["grpc"]) as client:
            begun = asyncio.Event()
            prompt = [2000 + 13 * i for i in range(40)]
            stream = asyncio.create_task(client.generate(by_tokens(prompt, STREAM_TOKENS), begun))
            await begun.wait()
            down = asyncio.create_task(asyncio.to_thread(kvhive, "down", "--grace", "60", timeout=120))
            result: Result = await stream
        stopped = (await down).stdout
        assert len(result.token_ids) == STREAM_TOKENS
        assert result.usage is not None and result.usage.failovers == 0
        assert "stopped 2 workers\n" in stopped and "nothing of it is left" in stopped
        assert [process.poll() for process in others] == [None, None]
        assert_nothing_left(state, kvhive.state_dir)
        assert "nothing to stop" in kvhive("down").stdout


def start_until(private_kvhive: Any, reached: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Begin a start and return when its state says that it has got that far."""
    process = private_kvhive.popen("up", *ONE_CPU_WORKER)
    file = private_kvhive.state_dir / "default" / "state.json"
    before = json.loads(file.read_text())["runtime_dir"] if file.exists() else None

    def state() -> Any:
        with contextlib.suppress(FileNotFoundError):
            now = json.loads(file.read_text())
            return now if now["runtime_dir"] != before and now[reached] else None

    found = eventually(state, within_s=UP_TIMEOUT_S)
    assert found and process.poll() is None
    return process, found


def interrupt(process: subprocess.Popen[str], by: signal.Signals = signal.SIGINT) -> None:
    process.send_signal(by)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "kvhive: interrupted"


def test_an_interrupt_early_in_a_start_leaves_nothing(private_kvhive: Any) -> None:
    process, state = start_until(private_kvhive, "ray")
    interrupt(process)
    assert_nothing_left(state, private_kvhive.state_dir)


def test_a_killed_start_is_removed_by_the_next_one_and_an_interrupt_late_in_that_leaves_nothing(
    private_kvhive: Any,
) -> None:
    process, killed = start_until(private_kvhive, "ray")  # which begins just now; Redis and a controller run
    process.kill()
    process.communicate(timeout=30)
    assert processes_of(Path(killed["runtime_dir"]))
    refused = private_kvhive("status", check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    process, interrupted = start_until(private_kvhive, "workers")
    assert processes_of(Path(killed["runtime_dir"])) == []
    interrupt(process, signal.SIGTERM)  # by now Ray is connected, and would like to answer it by itself
    for state in (killed, interrupted):
        assert_nothing_left(state, private_kvhive.state_dir)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_workers_on_a_ray_that_is_not_ours_leave_without_it(
    private_kvhive: Any, tmp_path: Path, tiny_model: Path
) -> None:
    """`down` must end the actors and leave the foreign Ray running; a second one of the name is refused.

    The head is this process's child and meant to outlive the function that started it: Python warns of that.
    """
    sessions: list[RaySession] = []
    head = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ[RUNTIME_DIR_VARIABLE] = head
    try:
        ray = start_head(Path(head), num_cpus=2, use_gpus=False, started=sessions.append)
        private_kvhive.extra.update(head_environment(ray.auth_token))
        arguments = ("--address", ray.address, *ONE_CPU_WORKER, f"--set=model.path={tiny_model}")
        private_kvhive("up", *arguments, timeout=UP_TIMEOUT_S)
        state = private_kvhive.state()
        (before,) = json.loads(private_kvhive("status", "--json").stdout)["workers"]
        other = type(private_kvhive)(tmp_path / "other", private_kvhive.extra)
        other.state_dir.mkdir()
        refused = other("up", *arguments, timeout=UP_TIMEOUT_S, check=False)
        assert refused.returncode == 1 and "already has a worker 'w1'" in refused.stderr
        assert not any(other.state_dir.iterdir())
        (after,) = json.loads(private_kvhive("status", "--json").stdout)["workers"]
        assert (after["id"], after["pid"]) == (before["id"], before["pid"]), "the refused start ended it"
        assert "stopped 1 worker" in private_kvhive("down", timeout=90).stdout
        assert processes_of(Path(state["runtime_dir"])) == []
        assert is_open(ray.address)
    finally:
        del os.environ[RUNTIME_DIR_VARIABLE]
        end_processes(lambda: processes_of(Path(head)), grace_s=10)
        shutil.rmtree(head, ignore_errors=True)
