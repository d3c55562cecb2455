"""Threads that share work: all of it is done once, whoever comes, and whoever else asks meanwhile."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from kvhive.kernels.native.operators import NativeOperators, native_operators


@pytest.fixture(scope="module")
def native() -> NativeOperators:
    found = native_operators(required=False)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


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


def test_helpers_sleep_when_there_is_nothing_to_do(native, four_threads):
    layer, x = native.pack_linear(torch.randn(4000, 64)), torch.randn(7, 64)
    for _ in range(50):
        layer(x, None)
    time.sleep(0.2)  # far more than they look for work
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    layer(x, None)


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
