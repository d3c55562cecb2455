"""`kvhive up` ends in a cluster that serves or in nothing; `kvhive down` leaves nothing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, end_processes, processes_of
from kvhive.scripts.ray_head import head_environment, start_head

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

TWO_CPU_WORKERS = ("--set", "workers.device=cpu", "--set", "workers.count=2", "--set", "workers.threads=1")
UP_TIMEOUT_S = 170


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
    result = cluster.kvhive("up", *TWO_CPU_WORKERS)
    assert "already up" in result.stdout
    after = cluster.status()
    assert [worker["epoch"] for worker in after["workers"]] == [
        worker["epoch"] for worker in before["workers"]
    ]
    assert after["router"] == before["router"]


def test_a_killed_worker_comes_back_under_a_new_epoch_without_anybody_asking(cluster: Any) -> None:
    victim = cluster.status()["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)

    def served_again() -> bool:
        worker = next((w for w in cluster.status()["workers"] if w["id"] == victim["id"]), None)
        return worker is not None and worker["state"] == "serving" and worker["epoch"] > victim["epoch"]

    assert eventually(served_again, within_s=90, every_s=1.0)
    assert eventually(
        lambda: all(w["routable"] for w in cluster.status()["workers"]), within_s=20, every_s=0.5
    )


def test_every_process_of_a_cluster_is_known_as_its_own(cluster: Any) -> None:
    state = cluster.kvhive.state()
    ours = {process.pid for process in processes_of(Path(state["runtime_dir"]))}
    workers = {worker["pid"] for worker in cluster.status()["workers"]}
    assert workers | {state["router"]["pid"], state["redis"]["pid"], state["ray"]["head"]["pid"]} <= ours
    assert RUNTIME_DIR_VARIABLE not in os.environ


def test_down_leaves_no_process_port_or_file_and_can_be_repeated(private_kvhive: Any) -> None:
    private_kvhive("up", *TWO_CPU_WORKERS, timeout=UP_TIMEOUT_S)
    state = private_kvhive.state()
    assert is_open(state["grpc"]) and is_open(state["http"])
    stopped = private_kvhive("down", timeout=90).stdout
    assert "stopped 2 workers" in stopped and "nothing of it is left" in stopped
    assert_nothing_left(state, private_kvhive.state_dir)
    assert "nothing to stop" in private_kvhive("down").stdout


@pytest.mark.parametrize("reached", ["ray", "redis", "workers"])
def test_an_interrupt_in_the_middle_of_a_start_leaves_nothing(private_kvhive: Any, reached: str) -> None:
    process = private_kvhive.popen("up", *TWO_CPU_WORKERS)
    file = private_kvhive.state_dir / "default" / "state.json"
    assert eventually(lambda: file.exists() and json.loads(file.read_text())[reached], within_s=UP_TIMEOUT_S)
    state = private_kvhive.state()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "kvhive: interrupted"
    assert_nothing_left(state, private_kvhive.state_dir)


def test_what_a_killed_start_left_is_removed_by_the_next_command(private_kvhive: Any) -> None:
    process = private_kvhive.popen("up", *TWO_CPU_WORKERS)
    file = private_kvhive.state_dir / "default" / "state.json"
    assert eventually(lambda: file.exists() and json.loads(file.read_text())["redis"], within_s=UP_TIMEOUT_S)
    state = private_kvhive.state()
    process.kill()
    process.communicate(timeout=30)
    assert processes_of(Path(state["runtime_dir"]))
    refused = private_kvhive("status", check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    private_kvhive("down", "--grace", "0", timeout=90)
    assert_nothing_left(state, private_kvhive.state_dir)


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


def test_workers_on_a_ray_that_is_not_ours_leave_without_it(private_kvhive: Any, tmp_path: Path) -> None:
    """`down` must end the actors and leave the foreign Ray running; a second one of the name is refused."""
    sessions: list[RaySession] = []
    head = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ[RUNTIME_DIR_VARIABLE] = head
    try:
        ray = start_head(Path(head), num_cpus=2, use_gpus=False, started=sessions.append)
        private_kvhive.extra.update(head_environment(ray.auth_token))
        arguments = ("--address", ray.address, *TWO_CPU_WORKERS)
        private_kvhive("up", *arguments, timeout=UP_TIMEOUT_S)
        state = private_kvhive.state()
        other = type(private_kvhive)(tmp_path / "other", private_kvhive.extra)
        other.state_dir.mkdir()
        refused = other("up", *arguments, timeout=UP_TIMEOUT_S, check=False)
        assert refused.returncode == 1 and "already has a worker 'w1'" in refused.stderr
        assert not any(other.state_dir.iterdir())
        assert len(json.loads(private_kvhive("status", "--json").stdout)["workers"]) == 2
        assert "stopped 2 workers" in private_kvhive("down", timeout=90).stdout
        assert processes_of(Path(state["runtime_dir"])) == []
        assert is_open(ray.address)
    finally:
        del os.environ[RUNTIME_DIR_VARIABLE]
        end_processes(lambda: processes_of(Path(head)), grace_s=10)
        shutil.rmtree(head, ignore_errors=True)
