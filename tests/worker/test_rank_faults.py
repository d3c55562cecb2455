"""A rank that is killed, hangs or cannot start: found, said, and nobody is left waiting or running."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_rig import Led, forkserver, lead_and_wait
from tiny_models import text, tiny

from kvhive.proto.errors import ModelError, Unavailable
from kvhive.worker import rank_group
from kvhive.worker.model_runner import Chunk
from kvhive.worker.rank_steps import tell_end
from kvhive.worker.sequence import SamplingParams

STEP = [Chunk(text(9), 0, range(2), SamplingParams(1))]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("Llama").save_pretrained(folder)
    return folder


@pytest.fixture
def led(model: Path) -> Iterator[Led]:
    made = Led(model, ask_s=0.1)
    yield made
    made.leader.close()


def test_ranks_end_when_they_are_let_go(led: Led) -> None:
    runner = led.load()
    time.sleep(0.3)  # they are asked after meanwhile
    runner.run(STEP)
    assert not led.lost.is_set()
    assert runner._ranks is not None
    with runner._ranks.turn:
        tell_end(runner._ranks)
    (process,) = led.ranks.processes
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def test_a_killed_rank_ends_the_step_that_needs_it(model: Path) -> None:
    led = Led(model, ask_s=1000.0, ranks=3)
    runner = led.load()
    os.kill(led.ranks.processes[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"rank [12] is lost"):
        for _ in range(3):
            runner.run(STEP)
    assert time.monotonic() - started < rank_group.RANK_TIMEOUT_S, "its connections closed"
    assert led.lost.wait(PATIENCE_S)
    led.leader.close()
    assert not led.running


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_worker_misses_a_rank_too(
    led: Led, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed: at the next question. Hung: when it has not answered for the time-out."""
    monkeypatch.setattr(rank_group, "RANK_TIMEOUT_S", 2.0)
    led.load().run(STEP)
    os.kill(led.ranks.processes[0].pid, blow)
    assert led.lost.wait(PATIENCE_S)
    led.leader.close()
    assert not led.running


def test_ranks_do_not_outlive_the_first(model: Path) -> None:
    """Killed without a word; nobody but its connections tells them."""
    ours, theirs = forkserver().Pipe()
    first = forkserver().Process(target=lead_and_wait, args=(model, theirs))
    first.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    (other,) = ours.recv()
    first.kill()
    first.join()
    deadline = time.monotonic() + rank_group.RANK_TIMEOUT_S / 2
    while runs(other):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its name in a table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_that_cannot_load_fails_the_start_with_its_reason(led: Led) -> None:
    led.ranks.options = dataclasses.replace(led.options, model_path="/nowhere")
    with pytest.raises(ModelError, match="of 2 ranks: rank 1: ended"):
        led.load()
    assert not led.lost.is_set(), "a start that fails is no loss of a worker"
    led.leader.close()
    assert not led.running


def test_all_ranks_have_the_pool_of_the_smallest(led: Led) -> None:
    """A block's id means the same block on each."""
    led.ranks.options = dataclasses.replace(led.options, pool_tokens=led.options.pool_tokens // 2)
    assert led.load().num_blocks == led.options.pool_tokens // led.options.block_size // 2
