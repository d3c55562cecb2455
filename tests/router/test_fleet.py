"""The columns that decisions read: true after every change, with a typical speed for who has none yet."""

from __future__ import annotations

import dataclasses
import random

import pytest
from worker_records import record

from kvhive.proto.index_schema import LoadReport
from kvhive.router.fleet import UNMEASURED, Fleet
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.routing_policy import Candidate
from kvhive.router.worker_registry import WorkerView

LOAD = LoadReport(
    blocks_total=64, blocks_free=32, step_base_s=0.01, step_per_token_s=0.001, max_step_tokens=512
)


def view(worker_id: str, at: float = 0.0, **changes: object) -> WorkerView:
    return WorkerView(record(worker_id, load=dataclasses.replace(LOAD, **changes)), at)  # type: ignore[arg-type]


def rows(fleet: Fleet, now: float = 0.0, **matches: int) -> dict[str, Candidate]:
    return {candidate.worker_id: candidate for candidate in fleet.candidates(matches, [], now)}


def test_a_row_says_what_the_report_says() -> None:
    fleet = Fleet(LoadTracker())
    fleet.update(
        [view("w1"), view("w2", queued_prefill_tokens=70, running=3, waiting=2, victim_reuse=0.5)], 0.0
    )
    table = fleet.candidates({"w2": 4, "gone": 9}, [("w2", 6), ("gone", 10)], 0.0)
    first, second = table
    assert (first.worker_id, second.worker_id) == ("w1", "w2")
    assert (second.matched_blocks, second.expected_blocks, first.expected_blocks) == (4, 6, 0)
    assert (second.queue_tokens, second.decoding, second.requests) == (70, 3, 5)
    assert (first.victim_reuse, second.victim_reuse) == (0.0, 0.5)
    assert (second.free_tokens, second.capacity_tokens, second.speed.max_step_tokens) == (512, 1024, 512)
    assert table[-1] == second and table[0:2] == [first, second]


def test_what_goes_before_a_request_leaves_out_what_waits_at_a_lower_priority() -> None:
    """Of this router's own requests, too, which are in no report yet."""
    loads = LoadTracker()
    fleet = Fleet(loads)
    fleet.update([view("w1", running=4, waiting=20, waiting_low=20, max_running=4)], 0.0)
    for number in range(24):
        loads.reserve(f"r{number}", "w1", 10, 0.0)
    fleet.update([view("w1", at=9.0, running=4, waiting=20, waiting_low=20, max_running=4)], 9.0)
    assert fleet.candidates({}, [], 9.0, priority=-1)[0].requests == 24
    (first,) = fleet.candidates({}, [], 9.0, priority=0)
    assert (first.requests, first.decoding) == (4, 4)


def speeds(fleet: Fleet) -> list[float]:
    return [candidate.speed.per_token_s for candidate in rows(fleet).values()]


def test_who_has_not_measured_itself_is_taken_for_a_typical_worker() -> None:
    """Not for an infinitely fast one, to which everything would go."""
    none = {"step_base_s": 0.0, "step_per_token_s": 0.0}
    fleet = Fleet(LoadTracker())
    fleet.update([view("w1", **none), view("w2", **none)], 0.0)
    assert speeds(fleet) == [UNMEASURED[1]] * 2
    views = [view(f"w{i}", step_base_s=0.01 * i, step_per_token_s=0.001 * i) for i in (1, 2, 6)]
    fleet.update([*views, view("w7", **none, max_step_tokens=99)], 0.0)
    speed = rows(fleet)["w7"].speed
    assert (speed.step_base_s, speed.per_token_s) == pytest.approx((0.02, 0.002))
    assert speed.max_step_tokens == 99


def test_workers_that_are_about_as_fast_are_taken_for_equals_and_others_are_not() -> None:
    """So a cold prompt's home does not hang on the noise of a measurement."""
    fleet = Fleet(LoadTracker())
    measured = (0.001, 0.0011, 0.0009, 0.00122, 0.0004, 0.003)
    fleet.update([view(f"w{i}", step_per_token_s=s) for i, s in enumerate(measured)], 0.0)
    assert speeds(fleet) == [0.0011, 0.0011, 0.0011, 0.0011, 0.0004, 0.003]


def test_between_reports_only_what_this_router_did_changes() -> None:
    loads = LoadTracker()
    fleet, views = Fleet(loads), [view("w1"), view("w2")]
    fleet.update(views, 1.0)
    loads.reserve("a", "w2", 100, now=1.0)
    fleet.update(views, 1.0)
    assert [(c.queue_tokens, c.requests, c.recent_cold_tokens) for c in rows(fleet, 1.0).values()] == [
        (0, 0, 0.0),
        (100, 1, 100.0),
    ]
    assert rows(fleet, 61.0)["w2"].recent_cold_tokens == pytest.approx(50.0), "fades without an update"
    loads.first_token("a", 1.5)
    fleet.update(views, 1.5)
    assert (rows(fleet)["w2"].queue_tokens, rows(fleet)["w2"].requests) == (0, 1)
    loads.finish("a", now=1.0)
    fleet.update(views, 1.6)
    assert rows(fleet)["w2"].requests == 0


def test_after_any_changes_the_columns_are_those_of_a_new_fleet() -> None:
    """Joins, leaves, reports, requests, in any order: what is updated in place equals what is built anew."""
    rng, loads = random.Random(5), LoadTracker()
    fleet, members, now = Fleet(loads), {}, 100.0
    for step in range(400):
        now += rng.random()
        worker_id = f"w{rng.randrange(6)}"
        match rng.randrange(5):
            case 0:
                members.pop(worker_id, None)
                loads.drop(worker_id)
            case 1 | 2:
                total = step * 10
                members[worker_id] = view(
                    worker_id, now - rng.random(), running=rng.randrange(9), prefix_queries=total
                )
            case 3:
                loads.reserve(f"r{rng.randrange(30)}", worker_id, rng.randrange(500), now)
            case 4:
                request = f"r{rng.randrange(30)}"
                loads.first_token(request, now) if rng.random() < 0.5 else loads.finish(request, now)
        views = [members[w] for w in sorted(members)]
        fleet.update(views, now)
        fresh = Fleet(loads)
        fresh.update(list(views), now)
        assert rows(fleet, now).keys() == members.keys()
        for w, candidate in rows(fleet, now).items():
            expected = rows(fresh, now)[w]
            assert candidate == dataclasses.replace(
                expected,
                recent_cold_tokens=pytest.approx(expected.recent_cold_tokens),
                cold_tokens_per_s=pytest.approx(expected.cold_tokens_per_s),
            )
