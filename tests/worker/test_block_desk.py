"""Who waits for which pull, and what that is taken to save."""

from __future__ import annotations

from engine_rig import ROOT

from kvhive.worker.block_desk import BlockDesk, PullOutcome
from kvhive.worker.block_moves import Arrival
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import BlockSource, SamplingParams, Sequence

BLOCK = 4
SOURCE = BlockSource("w2", "127.0.0.1:1", 1, 10)


class Desk:
    """A desk whose pulls only begin."""

    def __init__(self) -> None:
        manager = KvCacheManager(BlockPool(64), BLOCK, ROOT, lambda: 0.0)
        self.scheduler = Scheduler(manager, SchedulerLimits(64, 8, 8))
        self.desk = BlockDesk(self.scheduler, lambda do: do())
        self.begun: list[Arrival] = []
        self.desk.open(lambda arrival, source: self.begun.append(arrival), 100)

    def ask(
        self, name: str, tokens: list[int], source: BlockSource | None = None, after: Sequence | None = None
    ) -> Sequence:
        seq = Sequence(name, list(tokens), len(tokens), SamplingParams(4), source=source, after=after)
        self.scheduler.add(seq)
        self.desk.fetch_for(seq)
        return seq


def test_who_shares_a_part_of_a_pull_waits_for_it_and_still_counts_for_the_rest() -> None:
    """Forty tokens are on their way; the second prompt has eight of them, then nine of its own."""
    rig = Desk()
    rig.ask("a", list(range(41)), SOURCE)
    assert rig.scheduler.queued_prefill_tokens == 1
    other = rig.ask("b", [*range(8), *range(100, 109)])
    assert other in rig.begun[0].waiting
    assert rig.scheduler.queued_prefill_tokens == 1 + 9
    rig.desk.arrived(rig.begun[0], 10)
    rig.desk.ended(rig.begun[0], PullOutcome.PULLED)
    assert other.arrived == range(2), "no more of it is its own"


def test_further_choices_wait_for_their_leader_and_not_for_its_pull() -> None:
    rig = Desk()
    leader = rig.ask("q/0", list(range(41)), SOURCE)
    follower = rig.ask("q/1", list(range(41)), after=leader)
    assert rig.begun[0].waiting == [leader]
    rig.desk.ended(rig.begun[0], PullOutcome.BUSY)
    assert [item.seq for item in rig.scheduler.schedule()] == [leader], "one of them computes the prompt"
    assert follower.num_computed == 0


def test_nobody_joins_a_pull_whose_last_reader_has_gone() -> None:
    rig = Desk()
    gone = rig.ask("a", list(range(41)), SOURCE)
    rig.scheduler.cancel(gone)
    rig.desk.dropped(gone)
    assert rig.begun[0].stopped.is_set()
    for source in (SOURCE, None):
        rig.ask(f"again{source is None}", list(range(41)), source)
    assert len(rig.begun) == 1 and not rig.begun[0].waiting
    assert rig.scheduler.queued_prefill_tokens == 82
