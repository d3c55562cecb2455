"""A controller begins before all that it needs is known, and waits for the rest."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvhive.proto.errors import ClusterError
from kvhive.scripts import controller_process, ray_head
from kvhive.scripts.controller_process import ControllerSpec

SPEC = ControllerSpec(
    config={"cluster": "c"},
    ray_address="127.0.1.1:6379",
    ray_token="t",
    redis_url="redis://r",
    cluster_token="secret",
    model_path="/m",
    model_name="m",
    runtime_dir="/r",
    cores=2,
)


def test_it_reads_what_is_written_while_it_waits(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    writer = threading.Timer(0.2, SPEC.save, [path])
    writer.start()
    try:
        assert ControllerSpec.wait(path) == SPEC
    finally:
        writer.join()
    assert path.stat().st_mode & 0o777 == 0o600, "it holds the cluster's token"
    assert list(tmp_path.iterdir()) == [path]


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_process, "_SPEC_TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match=r"controller.json was not there after 0 s"):
        ControllerSpec.wait(tmp_path / "controller.json")


def test_it_waits_longer_than_ray_takes_at_most() -> None:
    """Each try that fails has its time, and then the time until it has ended."""
    tries = ray_head._ATTEMPTS * (ray_head._START_TIMEOUT_S + ray_head._STOP_TIMEOUT_S)
    assert tries < controller_process._SPEC_TIMEOUT_S
