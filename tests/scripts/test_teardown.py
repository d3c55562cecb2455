"""A tear-down without a cluster: a Ray of somebody else's that is away is not a Ray that is gone."""

import subprocess
from pathlib import Path

import pytest

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder
from kvhive.scripts.fleet_memory import FleetMemory
from kvhive.scripts.owned_processes import ProcessId, identify
from kvhive.scripts.teardown import tear_down


@pytest.fixture
def attached(tmp_path: Path) -> tuple[StateFolder, ClusterState]:
    runtime_dir = tmp_path / "runtime"
    runtime_dir.mkdir()
    folder = StateFolder(tmp_path / "state", "default")
    ray = RaySession("127.0.0.1:1")
    return folder, folder.save(ClusterState("default", str(runtime_dir), "t", ray=ray, workers=("w1", "w2")))


def test_workers_that_cannot_be_asked_are_named_and_the_state_is_kept(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    folder, state = attached
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1 does not answer.*w1, w2.*--forget"):
        tear_down(folder, state, grace_s=0.0)
    assert folder.load() == state


def test_forgetting_says_what_may_be_left_and_drops_the_state(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    folder, state = attached
    (line,) = tear_down(folder, state, grace_s=0.0, forget=True)
    assert line.startswith("forgot: ") and "w1, w2" in line
    assert folder.load() is None
    assert not Path(state.runtime_dir).exists()


def test_a_start_that_got_no_further_than_a_ray_that_is_away_leaves_nothing(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    folder, state = attached
    state = folder.save(ClusterState("default", state.runtime_dir, "t", ray=state.ray))
    assert tear_down(folder, state, grace_s=0.0) == []
    assert folder.load() is None


def test_workers_that_came_after_the_start_are_asked_for_too(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    """A cluster that began with none may have some."""
    folder, state = attached
    begun = ClusterState("default", state.runtime_dir, "t", ray=state.ray, controller=ProcessId(2**22 + 1, 1))
    state = folder.save(begun)
    FleetMemory(state.runtime_dir, 0, "cpu", "float32").save()
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1 does not answer"):
        tear_down(folder, state, grace_s=0.0)


def test_workers_of_another_cluster_of_that_name_are_left_alone(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    """A controller that was refused for their sake has begun no fleet: nothing in Ray is ours."""
    folder, state = attached
    begun = ClusterState("default", state.runtime_dir, "t", ray=state.ray, controller=ProcessId(2**22 + 1, 1))
    assert tear_down(folder, folder.save(begun), grace_s=0.0) == []
    assert folder.load() is None


def test_what_the_supervisor_started_just_before_is_ended_too(
    attached: tuple[StateFolder, ClusterState],
) -> None:
    folder, state = attached
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        folder.save(ClusterState("default", state.runtime_dir, "t", router=identify(process.pid)))
        stale = ClusterState("default", state.runtime_dir, "t")
        assert "stopped the router" in tear_down(folder, stale, grace_s=0.0)
        assert process.wait(10) is not None
    finally:
        process.kill()
        process.wait()
