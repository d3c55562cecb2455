"""Requests in flight: counted by tenant, bounded, and refused with a word on when a place will be free."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from worker_records import Clock

from kvhive.proto.errors import Overloaded
from kvhive.router.admission import UNKNOWN_PACE_S, Admission
from kvhive.router.held_requests import Waiting, in_turn
from kvhive.router.patience import Patience
from kvhive.router.retry_after import LEAST_S, MOST_S, SPREAD, retry_after_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(admission: Admission, tenant: str = "", priority: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as refused, admission.admitted(tenant, priority):
        pass
    return refused.value


def test_one_too_many_is_refused_and_a_place_that_comes_free_is_taken(clock: Clock) -> None:
    admission = Admission(2, clock)
    with ExitStack() as both:
        both.enter_context(admission.admitted())
        with admission.admitted():
            error = refusal(admission)
        assert str(error) == "2 requests are in flight, the limit is 2" and error.cause == "in_flight"
        with admission.admitted():
            assert admission.in_flight == 2
    assert admission.in_flight == 0 and not admission._by_tenant, "nothing is remembered of whom has gone"


def test_a_request_that_fails_gives_its_place_back(clock: Clock) -> None:
    admission = Admission(1, clock)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.admitted("a"):
            raise ZeroDivisionError
    assert admission.in_flight == 0


def test_a_tenant_that_floods_is_refused_before_one_that_does_not(clock: Clock) -> None:
    admission = Admission(8, clock)
    with ExitStack() as flood:
        for _ in range(8):
            flood.enter_context(admission.admitted("flood"))
        refusal(admission, "flood")
        with admission.admitted("other"), admission.admitted("other"):
            refusal(admission, "other")
            refusal(admission, "flood", priority=10)


def test_low_priorities_are_refused_first_and_high_ones_last(clock: Clock) -> None:
    admission = Admission(8, clock)
    with ExitStack() as seven:
        for _ in range(7):
            seven.enter_context(admission.admitted())
        refusal(admission, priority=-1)
        with admission.admitted():
            refusal(admission)
            with admission.admitted(priority=1):
                refusal(admission, priority=1)


def test_the_pace_of_ends_tells_when_to_come_again(clock: Clock) -> None:
    """One place every two seconds: whoever is refused third will find one after six."""
    admission = Admission(1, clock)
    with admission.admitted():
        assert refusal(admission).retry_after_s == UNKNOWN_PACE_S
    for _ in range(10):
        clock.now += 2.0
        with admission.admitted():
            pass
    clock.now += 2.0
    with admission.admitted():
        waits = [refusal(admission).retry_after_s for _ in range(3)]
    assert waits == pytest.approx([2.0, 4.0, 6.0])


def test_when_to_come_again_is_bounded_and_spread() -> None:
    assert (retry_after_s(0.0, 0.0), retry_after_s(1e9, 0.5)) == (LEAST_S, MOST_S)
    assert (retry_after_s(10.0, 0.0), retry_after_s(10.0, 1.0)) == (10.0, 10.0 * (1 + SPREAD))


def test_the_held_go_by_priority_then_by_tenants_in_turn_then_by_age() -> None:
    flood = [Waiting("flood", 0, float(i)) for i in range(3)]
    other, urgent, idle = Waiting("other", 0, 10.0), Waiting("flood", 5, 20.0), Waiting("other", -5, 0.0)
    order = in_turn([idle, *flood, other, urgent])
    assert order == [urgent, flood[0], other, flood[1], flood[2], idle]


def test_patience_names_what_ends_it() -> None:
    whole = Patience(since=100.0, queue_timeout_s=30.0, deadline=120.0, max_predicted_s=5.0)
    assert (whole.left_s(110.0), whole.predicted_within_s(110.0)) == (10.0, 5.0)
    assert whole.bound(110.0) == "router.max_predicted_ttft_s is 5"
    assert whole.predicted_within_s(117.0) == 3.0
    assert whole.bound(117.0) == "the call's deadline is 20.0 s"
    late = whole.over(121.0, "w1")
    assert (late.cause, str(late)) == (
        "deadline",
        "waited 21.0 s for a token of worker w1: the call's deadline is 20.0 s",
    )
    queued = Patience(100.0, 10.0, 120.0, 5.0).over(110.5, "")
    assert (queued.cause, str(queued)) == (
        "queue_timeout",
        "waited 10.5 s for a worker: router.queue_timeout_s is 10",
    )


def test_a_quiet_hour_does_not_make_places_come_free_slowly(clock: Clock) -> None:
    admission = Admission(1, clock)
    for _ in range(10):
        clock.now += 0.1
        with admission.admitted():
            pass
    clock.now += 3600.0
    with admission.admitted():
        assert refusal(admission).retry_after_s == pytest.approx(0.1)
        assert refusal(admission).retry_after_s == pytest.approx(0.2)
