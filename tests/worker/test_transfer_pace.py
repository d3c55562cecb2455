"""The bounds of a transfer: time, who gave up, and networks slower than there are."""

from __future__ import annotations

import threading
import time

import pytest

from kvhive.worker.transfer_pace import Pace, TransferStopped


def test_time_runs_out() -> None:
    pace = Pace(time.monotonic() - 0.1, 1.0)
    with pytest.raises(TransferStopped, match="out of time"):
        pace.next_limit()
    assert pace.last_limit() == 0.0


def test_a_chunk_has_the_stall_time_out_or_what_is_left() -> None:
    assert Pace(time.monotonic() + 60, 3.0).next_limit() == 3.0
    assert 50 < Pace(time.monotonic() + 60, 99.0).next_limit() <= 60


def test_who_gives_up_is_told_from_who_ran_out_of_time() -> None:
    pace = Pace(time.monotonic() + 60, 3.0)
    pace.stopped.set()
    with pytest.raises(TransferStopped, match="cancelled"):
        pace.next_limit()


def test_a_slower_network_brings_the_first_bytes_after_its_delay_and_all_at_its_rate() -> None:
    pace = Pace(time.monotonic() + 60, 3.0, bytes_per_s=1000.0, delay_s=0.1)
    began = time.monotonic()
    for nbytes in (50, 150):
        pace.throttle(nbytes)
    assert time.monotonic() - began >= 0.3


def test_nobody_waits_for_a_slower_network_once_it_is_given_up_or_out_of_time() -> None:
    stopped = threading.Event()
    threading.Timer(0.05, stopped.set).start()
    began = time.monotonic()
    Pace(began + 60, 60.0, stopped, bytes_per_s=1.0).throttle(1000)
    Pace(began + 0.1, 60.0, bytes_per_s=1.0).throttle(1000)
    assert time.monotonic() - began < 30
