"""What is done about a fleet: starts that came too late are taken back, warm caches are not."""

from __future__ import annotations

import pytest

from kvhive.scripts.fleet_plan import FleetPlan, Seen, plan


def serving(worker_id: str, value: float = 0.0, leaving: bool = False) -> Seen:
    return Seen(worker_id, "serving", value, leaving)


def test_as_many_as_wanted_are_left_alone() -> None:
    assert plan([serving("w1"), Seen("w2", "pending")], 2) == FleetPlan()


def test_missing_workers_are_created_and_those_that_come_count() -> None:
    assert plan([serving("w1"), Seen("w2", "starting"), Seen("w3", "warming")], 5) == FleetPlan(create=2)


def test_one_that_drains_does_not_count() -> None:
    assert plan([serving("w1"), Seen("w2", "draining")], 2) == FleetPlan(create=1)


def test_the_least_valuable_cache_goes_and_of_equals_the_youngest() -> None:
    fleet = [serving("w1", 3.0), serving("w2", 0.5), serving("w10", 0.5), serving("w3", 9.0)]
    assert plan(fleet, 3).drain == ("w10",)
    assert plan(fleet, 1).drain == ("w10", "w2", "w1")


def test_a_shrinking_fleet_takes_back_starts_before_it_touches_a_ready_worker() -> None:
    """Known fault 87: scaled 1 to 3 and back to 1 while two still load, the ready one stays."""
    fleet = [serving("w1"), Seen("w2", "starting"), Seen("w3", "pending")]
    assert plan(fleet, 1) == FleetPlan(end=("w3", "w2"))
    assert plan(fleet, 2) == FleetPlan(end=("w3",))


@pytest.mark.parametrize("stage", ["failed", "dead"])
def test_what_is_dead_is_cleared_away_and_replaced(stage: str) -> None:
    assert plan([serving("w1"), Seen("w2", stage)], 2) == FleetPlan(create=1, end=("w2",))  # type: ignore[arg-type]


def test_workers_on_a_machine_that_is_about_to_go_drain_and_are_replaced() -> None:
    fleet = [serving("w1", 9.0, leaving=True), serving("w2"), Seen("w3", "starting", leaving_node=True)]
    assert plan(fleet, 3) == FleetPlan(create=2, drain=("w1",), end=("w3",))


def test_nobody_is_wanted() -> None:
    assert plan([serving("w1"), Seen("w2", "pending")], 0) == FleetPlan(drain=("w1",), end=("w2",))
