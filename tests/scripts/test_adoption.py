"""`kvhive up` on what was started before: kept while its Ray runs, and what has ended comes back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvhive.proto.config import ClusterConfig, to_mapping
from kvhive.proto.errors import ClusterError
from kvhive.scripts import adoption, up_command
from kvhive.scripts.adoption import adopt, can_adopt
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, ProcessId, identify

ME = identify(os.getpid())
GONE = ProcessId(2**22 + 1, 1)
OURS = RaySession("127.0.1.1:1", "token", ME)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, "")
    found = StateFolder(tmp_path / "state", "default")
    found.save(
        ClusterState(
            "default", str(tmp_path), "t", ready=True, ray=OURS, router=ME, controller=ME, supervisor=ME
        )
    )
    return found


def test_what_came_up_is_kept_while_its_ray_runs(folder: StateFolder) -> None:
    state = folder.require()
    assert can_adopt(state) and can_adopt(replace(state, router=GONE, controller=GONE, supervisor=GONE))
    assert not can_adopt(replace(state, ready=False)), "its start was cut off"
    assert not can_adopt(replace(state, ray=RaySession("127.0.1.1:1", "token", GONE)))
    assert not can_adopt(replace(state, ray=RaySession("127.0.0.1:1"))), (
        "a Ray of others that does not answer"
    )
    assert not can_adopt(replace(state, ray=None))


def test_where_all_runs_nothing_is_started(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "_missing", lambda state: "")
    monkeypatch.setattr(adoption, "launch_supervisor", lambda *_: pytest.fail("doubled"))
    assert adopt(folder, folder.require(), lambda *_: None) == []


def test_another_supervisor_brings_back_what_has_ended(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save(replace(folder.require(), supervisor=GONE, router=GONE))
    monkeypatch.setattr(adoption, "launch_supervisor", lambda *_: ME)
    waited: list[str] = []

    def missing(state: ClusterState) -> str:
        assert state.supervisor == ME, "it is named before anybody waits for it"
        waited.append("router")
        return "router" if len(waited) < 3 else ""

    monkeypatch.setattr(adoption, "_missing", missing)
    assert adopt(folder, folder.require(), lambda *_: None) == ["supervisor", "router"]
    assert len(waited) == 3


def test_what_does_not_come_back_is_named(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "BACK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(adoption, "_missing", lambda state: "controller")
    with pytest.raises(ClusterError, match="lost its controller, which did not come back within 0 s"):
        adopt(folder, folder.require(), lambda *_: None)


def test_in_the_foreground_one_that_was_up_is_stayed_with_too(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and other commands may stop it meanwhile."""
    stayed: list[str] = []

    def stay(where: StateFolder, state: ClusterState) -> None:
        with where.lock():
            stayed.append(state.cluster)

    config = ClusterConfig()
    folder.save(replace(folder.require(), config=to_mapping(config)))
    monkeypatch.setattr(up_command, "_raise_on_signals", lambda: None)
    monkeypatch.setattr(up_command, "adopt", lambda *_: [])
    monkeypatch.setattr(up_command, "_say_where", lambda state: None)
    monkeypatch.setattr(up_command, "_stay", stay)
    up_command.run(config, folder, "", foreground=False)
    assert not stayed
    up_command.run(config, folder, "", foreground=True)
    assert stayed == ["default"]
