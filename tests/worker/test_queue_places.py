"""Who gets a place in a worker's queue, in which order the queue is served, and what is reported of it."""

from __future__ import annotations

import pytest
from engine_rig import Rig

from kvhive.proto.errors import Overloaded


def refused(rig: Rig, request_id: str) -> bool:
    """Whether a request was refused for want of a place."""
    errors = [output.error for output in rig.outputs.get(request_id, ()) if output.error]
    assert all(isinstance(error, Overloaded) for error in errors)
    return bool(errors)


def full(waiting: int = 16) -> Rig:
    """Two run for a long time; as many as the queue has places wait, all of one tenant."""
    rig = Rig(blocks=512, max_running=2, max_waiting=waiting)
    for number in range(2):
        rig.submit(f"runs{number}", [1, number], 200, tenant="flood")
    rig.step()
    for number in range(waiting):
        rig.submit(f"waits{number}", [2, number], 2, tenant="flood")
    rig.step()
    assert len(rig.scheduler.waiting) == waiting
    return rig


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"tenant": "flood"}, 0),
        ({"tenant": "flood", "priority": 5}, 2),
        ({"tenant": "other"}, 4),
        ({"tenant": "other", "priority": -5}, 2),
        ({"tenant": "flood", "priority": -5}, 0),
    ],
)
def test_a_full_queue_has_places_for_whom_it_is_not_full_of(fields: dict[str, object], places: int) -> None:
    rig = full()
    for number in range(8):
        rig.submit(f"new{number}", [3, number], 2, **fields)  # type: ignore[arg-type]
    rig.step()
    assert [refused(rig, f"new{number}") for number in range(8)] == [False] * places + [True] * (8 - places)
    rig.run()


def test_what_lost_its_worker_is_never_refused_and_goes_before_what_is_new() -> None:
    """Somebody is in the middle of its answer."""
    rig = full()
    for number in range(8):
        rig.submit(f"moved{number}", [4, number], 2, tenant="flood", moved=True)
    rig.step()
    assert not any(refused(rig, f"moved{number}") for number in range(8))
    rig.engine.cancel("runs0")
    order: list[str] = []
    while len(order) < 12:
        rig.step()
        order += [seq.request_id for seq in rig.scheduler.running if seq.request_id not in order]
    first = [name for name in order if not name.startswith("runs")][:8]
    assert first == [f"moved{number}" for number in range(8)]
    rig.run()


def test_a_flood_of_one_tenant_delays_another_by_one_request_at_most() -> None:
    rig = full()
    rig.submit("other", [5], 2, tenant="other")
    rig.step()
    rig.engine.cancel("runs0")
    before = 0
    while not rig.tokens("other"):
        rig.step()
        before = sum(bool(rig.tokens(f"waits{number}")) for number in range(16))
    assert before <= 1
    rig.run()


def test_the_report_tells_apart_what_waits_below_and_above_the_usual_priority() -> None:
    """Down to nothing when they have gone, however they went."""
    rig = Rig(blocks=512, max_running=1)
    rig.submit("runs", [1], 100)
    rig.step()
    for number in range(3):
        rig.submit(f"low{number}", [2, number] * 5, 2, priority=-2)
    rig.submit("high", [3] * 7, 2, priority=1)
    rig.submit("usual", [4] * 4, 2)
    rig.step()
    load = rig.engine.load
    assert (load.waiting, load.waiting_low, load.waiting_high) == (5, 3, 1)
    assert (load.queued_prefill_tokens, load.queued_low_tokens, load.queued_high_tokens) == (41, 30, 7)
    rig.engine.cancel("low1")
    rig.engine.cancel("high")
    rig.step()
    load = rig.engine.load
    assert (load.waiting_low, load.queued_low_tokens, load.queued_high_tokens) == (2, 20, 0)
    rig.run()
    load = rig.engine.load
    assert (load.waiting, load.waiting_low, load.waiting_high) == (0, 0, 0)
    assert (load.queued_low_tokens, load.queued_high_tokens) == (0, 0)
