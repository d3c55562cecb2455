"""Where workers go: devices are counted before anything is started, and what is short is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvhive.proto.config import ClusterConfig, parse_config
from kvhive.proto.errors import ClusterError
from kvhive.scripts import worker_fleet
from kvhive.scripts.worker_fleet import Fleet, choose_device, free_resources


def config(**workers: Any) -> ClusterConfig:
    return parse_config({"workers": workers})


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let Ray have machines with so many GPUs each."""

    def have(*gpus: int) -> None:
        nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(count)}} for count in gpus]
        nodes.append({"Alive": False, "Resources": {"GPU": 64.0}})
        monkeypatch.setattr(worker_fleet.ray, "nodes", lambda: nodes)
        monkeypatch.setattr(worker_fleet.ray, "cluster_resources", lambda: {"GPU": float(sum(gpus))})

    return have


def test_each_rank_owns_a_gpu_and_a_worker_s_ranks_share_a_machine(machines: Any) -> None:
    machines(4, 2)
    assert choose_device(config(count=3, tensor_parallel=2, device="cuda"), may_grow=False) == "cuda"
    for count, ranks, room in ((4, 2, 3), (2, 4, 1), (1, 5, 0)):
        with pytest.raises(ClusterError) as caught:
            choose_device(config(count=count, tensor_parallel=ranks), may_grow=False)
        said = str(caught.value)
        assert f"workers.tensor_parallel is {ranks}" in said and f"workers.count {count} " in said
        assert f"[4, 2], room for {room}" in said


def test_a_cluster_that_may_grow_is_waited_for(machines: Any) -> None:
    machines(1)
    assert choose_device(config(tensor_parallel=8, device="cuda"), may_grow=True) == "cuda"


def test_one_rank_alone_is_counted_as_before(machines: Any) -> None:
    machines(1)
    with pytest.raises(ClusterError, match=r"workers\.count is 2 but Ray has 1 GPU"):
        choose_device(config(count=2), may_grow=False)


def test_who_waits_for_a_place_reads_what_the_largest_machine_has(
    machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines(4, 2)
    monkeypatch.setattr(worker_fleet.ray, "available_resources", lambda: {"CPU": 3.0, "GPU": 1.0})
    assert free_resources() == "3 CPU, 1 GPU; most on one machine, free or not: 8 CPU, 4 GPU"


def test_ranks_share_the_cores_of_the_machine() -> None:
    fleet = Fleet(
        config=config(count=2, tensor_parallel=3),
        device="cpu",
        dtype="float32",
        model_path="m",
        model_name="m",
        redis_url="",
        cluster_token="",
        cores=12,
    )
    options = fleet.options("w1")
    assert (options.threads, options.tensor_parallel) == (2, 3)
