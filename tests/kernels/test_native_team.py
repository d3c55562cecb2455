"""Threads that share work: all of it is done once, whoever comes, and whoever else asks meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from kvhive.kernels.native.operators import native_operators


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_callers_on_several_threads_do_not_disturb_each_other(native, four_threads):
    torch.manual_seed(0)
    layer = native.pack_linear(torch.randn(2000, 64))
    inputs = [torch.randn(7, 64) for _ in range(4)]
    expected = [layer(x, None) for x in inputs]
    wrong = []

    def call(x, y):
        torch.set_num_threads(4)  # OpenMP's setting is each thread's own
        for _ in range(300):
            if not torch.equal(layer(x, None), y):
                wrong.append(x)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(inputs, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def tried(native, count: int, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often each piece was done, and by which thread."""
    times, by = torch.zeros(count, dtype=torch.int32), torch.full((count,), -1, dtype=torch.int32)
    native.library.kvhive_team_try(count, threads, times.data_ptr(), by.data_ptr())
    return times, by


def test_every_piece_is_done_once_by_a_thread_that_was_asked_for(native):
    """Rounds grow and shrink, so that a helper who is late for one meets a larger next one."""
    for number in range(4000):
        count, threads = 2 + 37 * number % 301, 2 + number % 4
        times, by = tried(native, count, threads)
        assert (times == 1).all(), number
        assert ((by >= 0) & (by < threads)).all(), number


def test_helpers_help_even_after_they_slept(native):
    for pause in (0, 0.3):  # far more than they look for work
        deadline = time.monotonic() + 60
        time.sleep(pause)
        while not (tried(native, 100_000, 2)[1] > 0).any():
            assert time.monotonic() < deadline, "no helper came"


def test_helpers_sleep_when_there_is_nothing_to_do():
    code = (
        "import time, torch\n"
        "from kvhive.kernels.native.operators import native_operators\n"
        "torch.set_num_threads(4)\n"
        "layer, x = native_operators(required=True).pack_linear(torch.randn(4000, 64)), torch.randn(7, 64)\n"
        "for _ in range(50): layer(x, None)\n"
        "time.sleep(0.5)\n"
        "before = time.process_time()\n"
        "time.sleep(1)\n"
        "print(time.process_time() - before)\n"
    )
    if native_operators(required=False) is None:
        pytest.skip("no C++ compiler here")
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    assert float(done.stdout) < 0.2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_works_without_the_helpers(native, four_threads):
    layer, x = native.pack_linear(torch.randn(4000, 64)), torch.randn(7, 64)
    expected = layer(x, None)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(layer(x, None), expected) else 1)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert ended[1] == 0
