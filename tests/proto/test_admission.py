"""Who still gets a place: what matters least is refused first, and no tenant takes the others' places."""

from __future__ import annotations

import pytest

from kvhive.proto.admission import Held, most_places


@pytest.mark.parametrize(("priority", "most"), [(-10, 70), (-1, 70), (0, 80), (1, 90), (10, 90)])
def test_the_limit_moves_by_an_eighth_with_the_priority(priority: int, most: int) -> None:
    assert most_places(80, priority, Held(50, 1, 50)) == most


def test_where_there_is_a_place_every_priority_gets_it_when_nobody_holds_it() -> None:
    assert [most_places(1, priority, Held(0, 1, 0)) for priority in (-1, 0, 1)] == [1, 1, 1]
    assert most_places(0, 1, Held(0, 1, 0)) == 0


@pytest.mark.parametrize(
    ("held", "most"),
    [
        (Held(0, 1, 0), 80),
        (Held(80, 1, 80), 80),
        (Held(80, 2, 90), 80),
        (Held(10, 2, 90), 100),
        (Held(0, 2, 80), 100),
        (Held(45, 2, 90), 80),
    ],
)
def test_who_holds_less_than_the_mean_has_places_beyond_it(held: Held, most: int) -> None:
    """And nobody who is alone, or who holds what the others do."""
    assert most_places(80, 0, held) == most


def test_a_flood_of_the_highest_priority_leaves_places_to_others() -> None:
    """Whatever the flood calls itself, it is above the mean, and the others are below it."""
    held = {"flood": 0, "other": 0}
    for _ in range(1000):
        if sum(held.values()) < most_places(64, 10, Held(held["flood"], 1, sum(held.values()))):
            held["flood"] += 1
    assert held["flood"] == 72
    for _ in range(1000):
        if sum(held.values()) < most_places(64, 0, Held(held["other"], 2, sum(held.values()))):
            held["other"] += 1
    assert held["other"] == 8


def test_what_is_held_in_all_is_bounded() -> None:
    assert max(most_places(64, p, Held(0, 100, 99)) for p in range(-10, 11)) == 64 * 11 // 8
    assert most_places(0, 10, Held(0, 2, 9)) == 0
