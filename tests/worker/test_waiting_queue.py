"""Who is served next: priorities that age, shares that are fair, and bounds that hold."""

from __future__ import annotations

import pytest
from engine_rig import Rig

from kvhive.worker.fair_share import MOST_IDLE_TENANTS, FairShare
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.waiting_queue import AGING_S, Ranking, WaitingQueue


class Line:
    """A queue and its shares, filled by hand."""

    def __init__(self) -> None:
        self.shares = FairShare()
        self.queue = WaitingQueue()
        self.tickets = 0

    def add(
        self, request_id: str, priority: int = 0, tenant: str = "", at: float = 0.0, preemptions: int = 0
    ) -> Sequence:
        seq = Sequence(request_id, [1, 2, 3], 3, SamplingParams(1), priority=priority, tenant=tenant)
        self.tickets += 1
        seq.waiting_since, seq.ticket, seq.preemptions = at, self.tickets, preemptions
        self.shares.enter(tenant)
        self.queue.append(seq)
        return seq

    def order(self, now: float = 0.0) -> list[str]:
        ids = []
        while (seq := self.queue.first(Ranking(now, self.queue.oldest(), self.shares))) is not None:
            self.queue.remove(seq)
            self.shares.charge(seq.tenant, 10)
            ids.append(seq.request_id)
        assert len(self.queue) == self.queue.tokens == 0
        return ids


def test_the_higher_priority_goes_first_and_equals_as_they_came() -> None:
    line = Line()
    for request_id, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        line.add(request_id, priority)
    assert line.order() == ["b", "d", "a", "c", "e"]


def test_one_level_of_priority_is_worth_the_aging_time() -> None:
    """Just before it the higher one still goes first, just after it the one that waited."""
    for waited, first in ((AGING_S - 0.1, "high"), (AGING_S + 0.1, "low")):
        line = Line()
        line.add("low", 0, at=0.0)
        line.add("high", 1, at=waited)
        assert line.order(now=waited + 5.0)[0] == first


def test_a_priority_out_of_range_counts_as_the_nearest_one_so_that_aging_is_bounded() -> None:
    line = Line()
    line.add("old", -(2**31), at=0.0)
    line.add("new", 2**31 - 1, at=21 * AGING_S)
    assert line.order(now=22 * AGING_S) == ["old", "new"]


def test_tenants_take_turns_by_what_they_were_served() -> None:
    line = Line()
    for i in range(4):
        line.add(f"a{i}", tenant="a")
    for i in range(2):
        line.add(f"b{i}", tenant="b")
    assert line.order() == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_age_within_a_line_does_not_undo_the_fair_share() -> None:
    """Fifty old requests of one tenant do not stand before the first of another."""
    line = Line()
    for i in range(50):
        line.add(f"a{i}", tenant="a", at=0.0)
    line.shares.charge("a", 10)
    line.shares.enter("b")  # b is lifted to a's counter, and a is served once more
    line.shares.charge("a", 10)
    line.add("b0", tenant="b", at=100 * AGING_S)
    assert line.order(now=100 * AGING_S)[0] == "b0"


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    shares = FairShare()
    for tenant in ("busy", "idle"):
        shares.enter(tenant)
    shares.charge("busy", 70)
    shares.leave("idle")
    shares.charge("busy", 30)
    shares.enter("idle")
    assert shares.served("idle") == shares.served("busy") == 100


def test_leaving_and_coming_back_does_not_wash_off_what_one_was_served() -> None:
    shares = FairShare()
    shares.enter("light")
    shares.enter("greedy")
    shares.charge("greedy", 500)
    shares.leave("greedy")
    shares.enter("greedy")
    assert (shares.served("greedy"), shares.served("light")) == (500, 0)


def test_counters_of_idle_tenants_are_bounded() -> None:
    shares = FairShare()
    for i in range(MOST_IDLE_TENANTS + 100):
        shares.enter(f"t{i}")
        shares.leave(f"t{i}")
    assert len(shares._idle) == MOST_IDLE_TENANTS and not shares._active


def test_the_preempted_go_before_the_newcomers_of_their_priority_only() -> None:
    line = Line()
    line.add("new")
    line.add("preempted", preemptions=1)
    line.add("high", priority=1)
    assert line.order() == ["high", "preempted", "new"]


def test_members_can_leave_from_anywhere() -> None:
    line = Line()
    a, b, c = (line.add(name, tenant=name) for name in "abc")
    held = Sequence("held", [1, 2, 3], 3, SamplingParams(1), after=a)
    line.queue.hold(held, a)
    assert len(line.queue) == 4 and line.queue.tokens == 10
    for seq in (b, held):
        line.queue.remove(seq)
        assert seq not in line.queue
    assert set(line.queue) == {a, c}
    with pytest.raises(KeyError):
        line.queue.remove(b)


def test_a_light_tenant_is_admitted_in_bounded_time_beside_a_greedy_one() -> None:
    """50 long prompts of one tenant wait. Each light request starts with the next slot, and in few steps."""
    rig = Rig(blocks=400, budget=32, max_running=4, max_waiting=100)
    for i in range(50):
        rig.submit(f"greedy{i}", range(10_000 + 100 * i, 10_064 + 100 * i), max_tokens=8, tenant="greedy")
    rig.run(steps=10)
    for i in range(5):
        seq = rig.submit(f"light{i}", range(20_000 + 100 * i, 20_008 + 100 * i), max_tokens=8, tenant="light")
        # What runs must end first: at most 4 prompts of 64 tokens at 32 a step, and their 8 tokens each.
        submitted = rig.engine.steps
        while not seq.num_computed:
            rig.run(steps=1)
        assert rig.engine.steps - submitted <= 4 * 64 // 32 + 8
        while seq.finish_reason is None:
            rig.run(steps=1)
        assert rig.engine.steps - submitted <= 4 * 64 // 32 + 8 + 8 + 1
    assert rig.scheduler.waiting, "the greedy tenant was still queueing"
    rig.run()


def test_two_busy_tenants_are_served_the_same_within_what_their_batch_holds() -> None:
    """Equal shares at every step, although one sends prompts eight times as long, and four times as many."""
    rig = Rig(blocks=400, budget=32, max_running=4, max_waiting=200)
    for i in range(80):
        rig.submit(f"l{i}", range(10_000 + 100 * i, 10_064 + 100 * i), max_tokens=8, tenant="long")
    for i in range(160):
        rig.submit(f"s{i}", range(30_000 + 100 * i, 30_008 + 100 * i), max_tokens=4, tenant="short")
    shares, largest = rig.scheduler._shares, 64 + 2 * 8
    rig.run(steps=1)
    while any(seq.tenant == "short" for seq in rig.scheduler.waiting):
        assert abs(shares.served("long") - shares.served("short")) <= 2 * largest
        rig.run(steps=1)
    assert shares.served("long") >= 1000
    rig.run()


def test_low_priority_starts_although_high_priority_never_pauses() -> None:
    """More high-priority requests arrive than can run; the low one waits about AGING_S, not for ever."""
    rig = Rig(blocks=64, budget=16, max_running=1, max_waiting=10_000)
    low = rig.submit("low", [1, 2, 3], max_tokens=2, priority=0)
    for i in range(10_000):
        rig.submit(f"high{i}", [i, 7], max_tokens=2, priority=1)
        rig.run(steps=1)
        rig.now += 0.3
        if low.num_computed:
            break
    # The line above has a queue of its own by then, whose oldest waits too; hence the factor.
    assert rig.now <= 2.5 * AGING_S, rig.now
    assert rig.now >= AGING_S - 1.0


def test_running_prompts_share_the_budget_in_the_same_order_and_newcomers_with_them() -> None:
    """A light tenant's prompt goes before the rest of a greedy one's, which was admitted long before."""
    rig = Rig(blocks=400, budget=8, max_running=4)
    greedy = rig.submit("greedy", range(1000, 1200), tenant="greedy")
    rig.submit("greedy2", range(2000, 2200), tenant="greedy")
    rig.run(steps=2)
    rig.submit("light", range(3000, 3016), tenant="light")
    rig.run(steps=4)
    assert rig.tokens("light") != [] and greedy.num_computed == 16 + 16, "they took turns"
    rig.submit("urgent", range(4000, 4016), tenant="greedy", priority=1)
    rig.run(steps=3)
    assert rig.tokens("urgent") != []
    rig.run()
