"""What is known of actors without waiting for any: the silent, the hung, the dead, those without a place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from worker_records import Clock

from kvhive.proto.config import parse_config
from kvhive.scripts import fleet_actors
from kvhive.scripts.fleet_actors import HUNG_AFTER_S, SILENT_AFTER_S, FleetActors
from kvhive.scripts.worker_fleet import Fleet
from kvhive.worker import actor

SERVING = {"phase": "serving", "detail": "serving", "address": "", "epoch": 1, "pid": 1, "node": "n1"}


class Worker:
    """An actor's handle: answers what a test lays out for it, or nothing yet."""

    def __init__(self) -> None:
        self.says: Any = None
        self.asked = 0
        self.stopped: list[float] = []
        self.status = SimpleNamespace(remote=self._ask)
        self.stop = SimpleNamespace(remote=self._stop)

    def _ask(self) -> tuple[Worker, int]:
        self.asked += 1
        return self, self.asked

    def _stop(self, grace_s: float) -> tuple[Worker, int]:
        self.stopped.append(grace_s)
        return self, 0


class FakeRay:
    """As much of Ray as is asked of it."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.killed: list[Worker] = []
        self.exceptions = ray.exceptions

    def wait(
        self, questions: list[Any], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Any], list[Any]]:
        ready = [question for question in questions if question[0].says is not None]
        return ready, []

    def get(self, question: Any) -> Any:
        if isinstance(question[0].says, Exception):
            raise question[0].says
        return question[0].says

    def kill(self, worker: Worker, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(worker)
        self.workers = {name: each for name, each in self.workers.items() if each is not worker}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay()

    def create(options: Any, placement: Any) -> Worker:
        worker = found.workers[options.worker_id] = Worker()
        return worker

    monkeypatch.setattr(fleet_actors, "ray", found)
    monkeypatch.setattr(fleet_actors, "create_worker", create)
    monkeypatch.setattr(fleet_actors, "list_workers", lambda cluster: sorted(found.workers))
    monkeypatch.setattr(fleet_actors, "find_worker", lambda cluster, worker: found.workers.get(worker))
    monkeypatch.setattr(fleet_actors, "give_place_back", lambda cluster, worker: None)
    return found


def actors(clock: Clock, **workers: Any) -> FleetActors:
    fleet = Fleet(parse_config({"workers": workers}), "cpu", "float32", "m", "m", "", "", 4)
    return FleetActors(fleet, {}, clock)


def test_an_actor_without_a_place_is_pending_and_asked_once(fake: FakeRay) -> None:
    fleet = actors(Clock())
    fleet.create("w1", 0.0)
    for _ in range(5):
        assert fleet.poll()["w1"].phase == "pending"
    assert fake.workers["w1"].asked == 1, "questions must not pile up"
    fake.workers["w1"].says = SERVING
    assert (fleet.poll()["w1"].phase, fleet.poll()["w1"].node) == ("serving", "n1")
    fleet.end("w1", 0.0)
    assert fake.killed and fake.killed[0].stopped == [0.0] and not fleet.poll()


def test_one_that_never_ran_is_ended_without_asking_it_to_stop(fake: FakeRay) -> None:
    fleet = actors(Clock())
    fleet.create("w1", 0.0)
    fleet.end("w1", 0.0)
    fleet.end("w1", 0.0)
    assert len(fake.killed) == 1 and not fake.killed[0].stopped


def test_workers_of_a_controller_before_this_one_are_found(fake: FakeRay) -> None:
    fake.workers["w7"] = Worker()
    fake.workers["w7"].says = SERVING
    fleet = actors(Clock())
    assert fleet.poll()["w7"].phase == "serving"


def test_what_is_being_ended_or_was_killed_a_moment_ago_is_not_found_again(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lists an actor until it has got round to its end: taken for another one it would be a failure."""
    clock = Clock()
    fleet = actors(clock)
    fleet.create("w1", 0.0)
    fake.workers["w1"].says = SERVING
    fleet.poll()
    listed = dict(fake.workers)
    meanwhile: list[Any] = []
    monkeypatch.setattr(fleet_actors, "list_workers", lambda cluster: sorted(listed))
    monkeypatch.setattr(fleet_actors, "find_worker", lambda cluster, worker: listed.get(worker))
    monkeypatch.setattr(fake, "kill", lambda worker, no_restart: meanwhile.append(fleet.poll()))
    fleet.end("w1", 0.0)
    assert meanwhile == [{}] and fleet.poll() == {}
    clock.now += 60.0
    assert "w1" in fleet.poll(), "it was not killed after all"


def test_workers_that_were_found_get_some_time_to_answer(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    wait = fake.wait

    def slow(questions: list[Any], num_returns: int = 1, timeout: float = 0.0) -> Any:
        waited.append(timeout)
        return wait(questions, num_returns, timeout)

    monkeypatch.setattr(fake, "wait", slow)
    fake.workers["w7"] = Worker()
    fleet = actors(Clock())
    fleet.poll()
    fleet.poll()
    assert waited[0] >= 2.0 > 0.5 > waited[1]


def test_silence_is_said_and_becomes_hanging_until_it_answers_again(fake: FakeRay) -> None:
    clock = Clock()
    fleet = actors(clock)
    fleet.create("w1", 0.0)
    fake.workers["w1"].says = SERVING
    fleet.poll()
    fake.workers["w1"].says = None
    fleet.poll()
    clock.now += SILENT_AFTER_S + 1
    assert fleet.poll()["w1"].phase == "serving" and fleet.poll()["w1"].detail == "does not answer"
    clock.now += HUNG_AFTER_S
    assert fleet.poll()["w1"].phase == "hung"
    fake.workers["w1"].says = SERVING
    fleet.poll()
    assert fleet.poll()["w1"].phase == "serving"


def test_a_restart_is_no_death(fake: FakeRay) -> None:
    fleet = actors(Clock())
    fleet.create("w1", 0.0)
    fake.workers["w1"].says = ray.exceptions.ActorUnavailableError("restarting", None)
    assert fleet.poll()["w1"].phase == "restarting"
    fake.workers["w1"].says = ray.exceptions.ActorDiedError()
    assert fleet.poll()["w1"].phase == "dead"
    asked = fake.workers["w1"].asked
    assert fleet.poll()["w1"].phase == "dead" and fake.workers["w1"].asked == asked


@pytest.mark.parametrize(("num_gpus", "reserved"), [(-1.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_gpus_are_reserved_as_the_configuration_says(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, num_gpus: float, reserved: float
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fleet_actors, "create_worker", lambda options, place: asked.append((options, place)))
    actors(Clock(), num_gpus=num_gpus).create("w1", 7.0)
    ((options, place),) = asked
    assert place.num_gpus == reserved and options.warm_s == 7.0


def test_a_cluster_whose_name_begins_like_another_one_s_has_its_own_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["kvhive-blue-w1", "kvhive-blue-w12", "kvhive-blue-sky-w1", "kvhive-green-w1", "else"]
    named = [{"namespace": "kvhive", "name": name} for name in names]
    named.append({"namespace": "other", "name": "kvhive-blue-w3"})
    monkeypatch.setattr(actor.ray.util, "list_named_actors", lambda everywhere: named)
    assert actor.list_workers("blue") == ["w1", "w12"]
