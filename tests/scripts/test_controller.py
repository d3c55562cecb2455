"""The controller on actors that are told what to say: as many as wanted, whatever dies or restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_rig import Rig
from transfer_rig import until

from kvhive.proto.errors import ClusterError
from kvhive.proto.index_schema import LoadReport, WorkerState
from kvhive.router.autoscaling_policy import AutoscalingState, Reason, ScalingDecision
from kvhive.scripts.controller import FAILED_SHOWN_S, RETRY_FIRST_S, answers
from kvhive.scripts.drain import DrainOrder
from kvhive.scripts.fleet_actors import ActorView


async def test_the_number_is_kept_whatever_dies(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert await rig.step() == {"w1", "w2"}
    assert await rig.step() == {"w1", "w2"}
    rig.ray.views["w1"] = ActorView("dead", "killed")
    await rig.step()
    rig.clock.now += RETRY_FIRST_S
    assert await rig.step() == {"w2", "w3"}, "no id is used twice"


async def test_a_worker_that_cannot_start_is_shown_then_replaced_less_and_less_often(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=1)
    rig.ray.first = ActorView("failed", "ModelError: no such file")
    await rig.step()
    await rig.step()
    (shown,) = rig.controller.document()["workers"]
    assert shown["phase"] == "failed" and "no such file" in shown["detail"]
    pauses = []
    for _ in range(3):
        rig.clock.now += FAILED_SHOWN_S + 1
        await rig.step()
        assert not rig.ray.views
        began = rig.clock.now
        while not await rig.step():
            rig.clock.now += 1.0
        pauses.append(rig.clock.now - began)
        await rig.step()
    assert pauses == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]


async def test_a_worker_that_keeps_failing_is_replaced_less_often_though_another_one_serves(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, wanted=1)
    await rig.step()
    rig.registers("w1")
    await rig.step()
    await rig.controller.scale(2)
    pauses = []
    for _ in range(3):
        rig.ray.first = ActorView("dead", "killed")
        began = rig.clock.now
        while await rig.step() == {"w1"}:
            rig.clock.now += 1.0
        pauses.append(rig.clock.now - began)
        assert await rig.step() == {"w1"}, "it has ended again"
    assert pauses == [0.0, RETRY_FIRST_S, 2 * RETRY_FIRST_S]
    rig.ray.first = ActorView("serving", "serving")
    rig.clock.now += 4 * RETRY_FIRST_S
    await rig.step()
    await rig.step()
    rig.ray.views["w5"] = ActorView("dead", "killed")
    await rig.step()
    rig.clock.now += RETRY_FIRST_S
    assert await rig.step() == {"w1", "w6"}, "one has served since: all begins anew"


async def test_a_worker_that_hangs_is_replaced_when_its_lease_is_over_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=1)
    await rig.step()
    rig.registers("w1")
    rig.ray.views["w1"] = ActorView("hung", "does not answer")
    assert await rig.step() == {"w1"}
    rig.records.clear()
    await rig.step()
    rig.clock.now += RETRY_FIRST_S
    assert await rig.step() == {"w2"} and rig.ray.ended == ["w1"]


async def test_scaling_by_hand_takes_the_least_valuable_cache_and_brings_new_ids(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=3)
    await rig.step()
    for turn in range(2):
        for worker_id, hits in (("w1", 500), ("w2", 10), ("w3", 900)):
            rig.registers(worker_id, hits * turn)
        await rig.step()
    assert await rig.controller.scale(2) == 3
    await rig.step()
    await until(lambda: rig.ray.ended == ["w2"])
    await rig.controller.scale(4)
    await rig.step()
    assert set(rig.ray.views) == {"w1", "w3", "w4", "w5"}
    for wrong in (-1, 1025):
        with pytest.raises(ClusterError, match=f"workers: must be 0 to 1024, are {wrong}"):
            await rig.controller.scale(wrong)


async def test_a_drain_by_hand_shrinks_the_cluster_by_one_and_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2)
    await rig.step()
    rig.registers("w1")
    rig.registers("w2")
    await rig.step()
    rig.calls.open = 1
    assert await rig.controller.drain(DrainOrder("w1", 60.0)) == 1
    with pytest.raises(ClusterError, match="is being drained already"):
        await rig.controller.drain(DrainOrder("w1"))
    with pytest.raises(ClusterError, match="no worker 'w9': w1, w2"):
        await rig.controller.drain(DrainOrder("w9"))
    with pytest.raises(ClusterError, match="only one that serves"):
        await rig.controller.drain(DrainOrder("w2"))
    await rig.step()
    assert rig.controller.document()["drains"]["w1"]["open_requests"] == 1
    rig.calls.open = 0
    await until(lambda: rig.ray.ended == ["w1"])
    assert await rig.step() == {"w2"}
    assert rig.controller.document()["drained"]["w1"]["done"]


async def test_a_worker_without_a_place_is_shown_and_taken_back_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=1)
    await rig.step()
    rig.ray.first = ActorView("pending", "waiting for a place in Ray")
    await rig.controller.scale(2)
    await rig.step()
    await rig.step()
    document = rig.controller.document()
    assert [w["stage"] for w in document["workers"]] == ["serving", "pending"] and document["free"] == "1 CPU"
    await rig.controller.scale(1)
    assert await rig.step() == {"w1"}


async def test_workers_on_a_machine_that_will_go_drain_and_others_come(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2)
    await rig.step()
    for worker_id in ("w1", "w2"):
        rig.registers(worker_id)
    rig.ray.views["w1"] = ActorView("serving", "serving", "going")
    rig.leaving = {"going"}
    await rig.step()
    await until(lambda: rig.ray.ended == ["w1"])
    assert await rig.step() == {"w2", "w3"}
    assert ("w1", WorkerState.DRAINING) in rig.calls.told


async def test_the_next_controller_goes_on_where_this_one_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2)
    await rig.step()
    for worker_id in ("w1", "w2"):
        rig.registers(worker_id)
    await rig.step()
    rig.calls.open = 1
    await rig.controller.drain(DrainOrder("w1", 60.0))
    await rig.controller.close()
    rig.controller = rig.another()
    assert await rig.step() == {"w1", "w2"}, "nothing doubled, nothing replaced"
    assert "w1" in rig.controller.document()["drains"]
    rig.calls.open = 0
    await until(lambda: rig.ray.ended == ["w1"])
    assert await rig.step() == {"w2"}


async def test_a_controller_that_has_just_come_cuts_off_nobody_whom_it_has_not_seen_yet(
    tmp_path: Path,
) -> None:
    """It knows neither their records nor an answer of their actors: they may serve all the same."""
    rig = Rig(tmp_path, wanted=3)
    await rig.step()
    for worker_id in ("w1", "w2", "w3"):
        rig.registers(worker_id)
    await rig.step()
    rig.calls.open = 1
    await rig.controller.drain(DrainOrder("w1", 60.0))
    await rig.controller.scale(1)
    await rig.controller.close()
    known = dict(rig.records)
    rig.records.clear()
    rig.ray.views = {worker_id: ActorView("pending", "waiting") for worker_id in rig.ray.views}
    rig.calls.told.clear()
    rig.lease_s = 5.0
    rig.controller = rig.another()
    await rig.step()
    assert await rig.controller.drain(DrainOrder("w2", 60.0)) == 0
    assert await rig.step() == {"w1", "w2", "w3"} and not rig.calls.told and not rig.ray.ended
    rig.records.update(known)
    assert await rig.step() == {"w1", "w2", "w3"}
    await until(lambda: {w for w, _ in rig.calls.told} == {"w1", "w2", "w3"})
    assert not rig.ray.ended, "each has an open stream"
    rig.calls.open = 0
    await until(lambda: sorted(rig.ray.ended) == ["w1", "w2", "w3"])


async def test_whom_a_new_controller_has_not_seen_within_a_lease_is_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2)
    await rig.step()
    await rig.controller.scale(1)
    rig.lease_s = 5.0
    rig.controller = rig.another()
    rig.ray.views["w2"] = ActorView("starting", "loading")
    assert await rig.step() == {"w1", "w2"}
    rig.clock.now += rig.lease_s
    assert await rig.step() == {"w1"}


async def test_a_worker_found_draining_that_nobody_remembers_is_drained_to_its_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=1)
    await rig.step()
    rig.registers("w1", state=WorkerState.DRAINING)
    await rig.step()
    await until(lambda: rig.ray.ended == ["w1"])
    assert await rig.step() == {"w2"}


async def test_one_that_joins_others_is_warmed_and_then_told_to_serve(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=1, warm_s=5.0)
    await rig.step()
    rig.registers("w1")
    await rig.step()
    await rig.controller.scale(2)
    await rig.step()
    assert rig.ray.warm_s == {"w1": 0.0, "w2": 5.0}, "the first has nobody to be warmed by"
    rig.registers("w2", state=WorkerState.WARMING)
    await rig.step()
    assert rig.controller.document()["workers"][1]["stage"] == "warming"
    await until(lambda: rig.calls.told == [("w2", WorkerState.SERVING)])


async def test_one_that_ray_has_restarted_is_warmed_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2, warm_s=5.0)
    await rig.step()
    rig.registers("w1")
    rig.registers("w2", state=WorkerState.WARMING)
    for epoch in (1, 2):
        rig.registers("w2", state=WorkerState.WARMING, epoch=epoch)
        for _ in range(2):
            await rig.step()
        await until(lambda: rig.calls.told == [("w2", WorkerState.SERVING)] * epoch)  # noqa: B023


async def test_one_that_is_drained_while_it_is_warmed_is_not_told_to_serve(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wanted=2, warm_s=60.0)
    await rig.step()
    rig.registers("w1")
    rig.registers("w2", state=WorkerState.WARMING)
    rig.records["w2"] = replace(rig.records["w2"], load=LoadReport())  # its warming waits for its report
    await rig.step()
    rig.calls.open = 1
    await rig.controller.drain(DrainOrder("w2", 60.0))
    rig.registers("w2", state=WorkerState.DRAINING)
    await rig.step()
    await until(lambda: "w1" in rig.calls.gave)
    rig.calls.open = 0
    await until(lambda: rig.ray.ended == ["w2"])
    assert ("w2", WorkerState.SERVING) not in rig.calls.told


class Wishes:
    """A policy that says what a test wants."""

    def __init__(self) -> None:
        self.target = 1

    def decide(self, views: Any, stages: Any, now: float) -> ScalingDecision:
        return ScalingDecision(self.target, Reason.PREFILL, AutoscalingState())


async def test_with_autoscaling_the_policy_decides_and_people_do_not(tmp_path: Path) -> None:
    wishes = Wishes()
    rig = Rig(tmp_path, wanted=1, policy=wishes)
    await rig.step()
    wishes.target = 3
    assert await rig.step() == {"w1", "w2", "w3"}
    with pytest.raises(ClusterError, match=r"autoscaling\.enabled is on"):
        await rig.controller.scale(1)
    rig.registers("w3")
    await rig.step()
    assert await rig.controller.drain(DrainOrder("w3", 5.0)) == 3
    await until(lambda: rig.ray.ended == ["w3"])
    assert await rig.step() == {"w1", "w2", "w4"}
    document = rig.controller.document()
    assert document["autoscaling"] and document["reason"] == "prefill" and document["wanted"] == 3


async def test_what_is_no_question_is_refused(tmp_path: Path) -> None:
    answer = answers(Rig(tmp_path).controller)
    assert (await answer({"do": "fleet"}))["wanted"] == 2
    for wrong in ({}, {"do": "scale"}, {"do": "scale", "workers": "3"}, {"do": "drain", "worker": "w1"}):
        with pytest.raises(ClusterError, match="not a question"):
            await answer(wrong)
    await asyncio.sleep(0)
