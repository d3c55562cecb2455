"""The pool's promises, kept while blocks come from other workers and go to them."""

from __future__ import annotations

from engine_rig import ROOT
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from pool_accounting import BLOCK, PREFIXES, PoolAccounting

from kvhive.proto.block_chain import hash_chain
from kvhive.proto.block_hash import namespace_extras
from kvhive.worker.block_desk import PullOutcome
from kvhive.worker.block_moves import Arrival, Loan
from kvhive.worker.pins import ChainPin
from kvhive.worker.sequence import BlockSource

ENOUGH_PULLS = 120
SOURCE = BlockSource("elsewhere", "nowhere:1", 1, 100)


class MovingAccounting(PoolAccounting):
    """Other workers that hold everything, and give it in pieces, late, twice or not at all."""

    pulls = 0

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[Arrival] = []
        self.over: list[Arrival] = []
        self.loans: list[Loan] = []
        self.tokens_of: dict[bytes, list[int]] = {}

    def attach(self) -> None:
        self.rig.engine.desk.open(lambda arrival, source: self.arrivals.append(arrival), 16)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(5, 14),
        tail=st.lists(st.integers(300, 302), max_size=6),
        salt=st.sampled_from(["", "s"]),
        n=st.sampled_from([1, 1, 3]),
        blocks=st.integers(1, 5),
        priority=st.integers(-1, 1),
    )
    def submit_with_source(
        self, prefix: list[int], length: int, tail: list[int], salt: str, n: int, blocks: int, priority: int
    ) -> None:
        self.attach()
        self.serial += 1
        prompt = prefix[:length] + tail
        chain = hash_chain(ROOT, prompt, BLOCK, namespace_extras(salt))
        for index, block_hash in enumerate(chain):
            self.tokens_of[block_hash] = prompt[index * BLOCK : (index + 1) * BLOCK]
        first, *_ = self.rig.choices(f"r{self.serial}", prompt, n, salt=salt, priority=priority)
        first.source = BlockSource("elsewhere", "nowhere:1", 1, blocks)

    @rule(which=st.integers(0, 5), count=st.integers(1, 5))
    def arrive(self, which: int, count: int) -> None:
        """Some more blocks have come. Reports of what is over are late, and change nothing."""
        known = self.arrivals or self.over
        if known:
            arrival = known[which % len(known)]
            come = min(len(arrival.missing), arrival.arrived + count)
            if not arrival.ended:
                self.write(arrival, come)
            self.rig.engine.desk.arrived(arrival, come)

    @rule(which=st.integers(0, 5), outcome=st.sampled_from(list(PullOutcome)), twice=st.booleans())
    def end(self, which: int, outcome: PullOutcome, twice: bool) -> None:
        if self.arrivals:
            arrival = self.arrivals.pop(which % len(self.arrivals))
            self.over.append(arrival)
            for _ in range(1 + twice):
                self.rig.engine.desk.ended(arrival, outcome)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        salt=st.sampled_from(["", "s"]),
        pin=st.sampled_from([None, ChainPin(2, 5.0, "a"), ChainPin(3, 100.0, "b")]),
    )
    def fetch(self, prefix: list[int], salt: str, pin: ChainPin | None) -> None:
        """A chain for its own sake."""
        self.attach()
        chain = hash_chain(ROOT, prefix, BLOCK, namespace_extras(salt))
        for index, block_hash in enumerate(chain):
            self.tokens_of[block_hash] = prefix[index * BLOCK : (index + 1) * BLOCK]
            self.parents[block_hash] = chain[index - 1] if index else ROOT
        self.rig.engine.desk.fetch(chain, SOURCE, lambda blocks, error: None, pin)

    @rule(prefix=st.sampled_from(PREFIXES), salt=st.sampled_from(["", "s"]))
    def lend(self, prefix: list[int], salt: str) -> None:
        chain = hash_chain(ROOT, prefix, BLOCK, namespace_extras(salt))
        self.rig.engine.desk.lend(chain, self.loans.append)

    @rule(which=st.integers(0, 5))
    def give_back(self, which: int) -> None:
        if self.loans:
            self.rig.engine.desk.give_back(self.loans.pop(which % len(self.loans)), 1)

    def write(self, arrival: Arrival, count: int) -> None:
        """What the transfer's thread does: the tokens of these blocks, which are the simulated KV."""
        places = zip(arrival.missing[:count], arrival.incoming[:count], strict=True)
        for index, (block_hash, block) in enumerate(places):
            if index >= arrival.arrived:
                for offset, token in enumerate(self.tokens_of[block_hash]):
                    self.rig.runner._slots[block * BLOCK + offset] = token

    def teardown(self) -> None:
        if self.serial or self.arrivals or self.loans:
            self.rig.engine.step()
            for arrival in self.arrivals:
                self.rig.engine.desk.ended(arrival, PullOutcome.BROKEN)
            for loan in self.loans:
                self.rig.engine.desk.give_back(loan, 0)
            self.rig.engine.step()
            moves, waiting = self.rig.engine.desk.moves, self.rig.scheduler.waiting
            assert moves.idle and not waiting._parked
            type(self).pulls += self.rig.engine.desk.outcomes.total()
        super().teardown()
        if self.serial:
            assert self.rig.engine.load.accounting_errors == 0
            assert all(seq.incoming_tokens == 0 for seq in self.rig.sequences.values())


def test_the_promises_hold_while_blocks_come_and_go() -> None:
    """Faults 80 to 82: exact accounting, true tokens, closed prefixes; late reports change nothing."""
    MovingAccounting.pulls = 0
    patient = settings(
        max_examples=40,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    while MovingAccounting.pulls < ENOUGH_PULLS:
        run_state_machine_as_test(MovingAccounting, settings=patient)
