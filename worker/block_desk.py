"""Where the engine and transfers meet: who lends, who waits for what, and what became of each pull.

A sequence whose prompt another worker is said to hold is parked until those blocks have come, or have
not; then it is scheduled as any other one and computes what is missing. Sequences that want the same blocks
wait for one pull. A transfer speaks to the engine only through this desk, from any thread; what it says is
done between two steps, and is bookkeeping alone: a microsecond a block, no copying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from enum import StrEnum

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_moves import Arrival, BlockMoves, Loan
from kvhive.worker.hot_chains import HotBounds, HotChain, hot_chains
from kvhive.worker.pins import ChainPin
from kvhive.worker.scheduler import Scheduler
from kvhive.worker.sequence import BlockSource, Sequence
from kvhive.worker.transfer_rate import TransferRate

MAX_ARRIVALS = 64
"""Pulls under way or waiting for their turn; whoever comes beyond computes at once."""


class PullOutcome(StrEnum):
    """What became of a pull. All but PULLED leave the rest of the prompt to be computed."""

    PULLED = "pulled"
    """Everything came."""
    SHORT = "short"
    """The source held less than it was said to, but what it held came."""
    NO_ROOM = "no_room"
    """No blocks to put them in, or too many pulls already."""
    BUSY = "busy"
    """The source is sending to as many as it may, or other pulls to here took too long."""
    REFUSED = "refused"
    """The source is another worker or epoch, or its blocks are of another kind."""
    UNREACHABLE = "unreachable"
    """The source does not answer."""
    BROKEN = "broken"
    """The channel failed: the source died, or hung."""
    TIMED_OUT = "timed_out"
    """It took longer than workers.transfer.timeout_s."""
    AVOIDED = "avoided"
    """The source has just failed, and is left alone for a while."""
    CANCELLED = "cancelled"
    """Nobody wanted it any more."""


_TIMED = (PullOutcome.PULLED, PullOutcome.TIMED_OUT)
"""What says something of the network's speed."""

StartPull = Callable[[Arrival, BlockSource], None]
"""Begins to bring a chain, without waiting: whoever does reports to the desk, the end in any case."""


class BlockDesk:
    """One engine's desk. `fetch_for` and `dropped` belong to the engine's thread, the rest to any."""

    def __init__(self, scheduler: Scheduler, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` has something done between two steps. Until `open` nothing is pulled."""
        self._scheduler = scheduler
        self._post = post
        self._start: StartPull | None = None
        self.block_bytes = 0
        """What one block is to a transfer; 0 while blocks do not move."""
        self.rate = TransferRate(scheduler.manager.clock)
        """How fast they come, from the asking to the end."""
        self.moves = BlockMoves(scheduler.manager)
        self.outcomes: Counter[PullOutcome] = Counter()
        self.sent_blocks = 0

    def open(self, start: StartPull | None, block_bytes: int) -> None:
        """Let `start` pull from now on, None nothing, while blocks of so many bytes can be sent."""

        def open_desk() -> None:  # a step, if only an empty one: it reports
            self._start, self.block_bytes = start, block_bytes

        self._post(open_desk)

    def fetch_for(self, seq: Sequence) -> None:
        """Park a sequence that was just queued, if its source is worth it, or a pull brings what it lacks.

        The router counts on the latter where it has sent somebody here with a source just before.
        """
        source, manager = seq.source, self._scheduler.manager
        if seq.after is not None or (source is None and self.moves.idle):
            return  # who waits for another choice's prompt waits for what that one pulls
        hashes = manager.usable(seq)
        if source is not None:
            arrival = self._fetch(hashes[: source.blocks], source)
        else:
            arrival = _wanted(self.moves.under_way(hashes))
        if arrival is not None:
            arrival.waiting.append(seq)
            self._scheduler.waiting.park(seq, arrival.brings(hashes) * manager.block_size)

    def dropped(self, seq: Sequence) -> None:
        """A sequence was cancelled: stop what nobody else waits for."""
        for arrival in self.moves.arrivals():
            if seq in arrival.waiting:
                arrival.waiting.remove(seq)
                if not arrival.waiting and not arrival.watching:
                    arrival.stopped.set()

    def fetch(
        self,
        hashes: ReadOnly[BlockHash],
        source: BlockSource,
        done: Callable[[int, str], None],
        pin: ChainPin | None = None,
    ) -> None:
        """Bring a chain for its own sake; `done(blocks held here, why no more)` follows in any case.

        What has come of it by then is kept as `pin` says, if that is all that is to be, and there is room.
        """
        before = -1

        def end(held: int, outcome: str) -> None:
            if pin is not None:
                self.moves.keep(hashes[: pin.blocks], pin)
            done(held, outcome)

        def fetch() -> None:
            arrival = self._fetch(hashes, source)
            if arrival is None:
                held = self.moves.count(hashes)
                end(held, "" if held == len(hashes) else PullOutcome.NO_ROOM)
            else:
                arrival.watching.append(go_on)

        def go_on(outcome: str) -> None:
            """A pull that was under way may have brought the beginning only."""
            nonlocal before
            held = self.moves.count(hashes)
            if outcome or held == len(hashes):
                end(held, outcome)
            elif held <= before:
                end(held, PullOutcome.SHORT)
            else:
                before = held
                fetch()

        self._post(fetch)

    def hot_chains(self, bounds: HotBounds, done: Callable[[list[HotChain]], None]) -> None:
        """List the chains that were found most often and last; see hot_chains."""

        def look() -> None:
            manager = self._scheduler.manager
            blocks = manager.pool.blocks
            tables = (seq.block_table[: seq.registered] for seq in self._scheduler.running)
            live = [blocks[block_id] for table in tables for block_id in table]
            done(hot_chains(manager.pool, live + self.moves.held(), bounds, manager.clock()))

        self._post(look)

    def lend(self, hashes: ReadOnly[BlockHash], done: Callable[[Loan], None]) -> None:
        """Hold the leading blocks of a chain for sending; none while somebody waits for blocks."""

        def lend() -> None:
            room = self._scheduler.manager.pool.available - self._scheduler.reserved_blocks()
            done(self.moves.lend(() if self._scheduler.cramped else hashes, room))

        self._post(lend)

    def give_back(self, loan: Loan, sent_blocks: int) -> None:
        """So many of them are sent, and no more will be."""

        def give_back() -> None:
            self.sent_blocks += sent_blocks
            self.moves.give_back(loan)

        self._post(give_back)

    def arrived(self, arrival: Arrival, count: int) -> None:
        """The first `count` of an arrival's missing blocks are in the pool."""
        self._post(lambda: self.moves.settle(arrival, count))

    def ended(self, arrival: Arrival, outcome: PullOutcome) -> None:
        """Nothing more comes of an arrival, and nothing writes to its blocks any more."""

        def end() -> None:
            if arrival.ended:
                self.moves.late += 1
                return
            self.outcomes[outcome] += 1
            if outcome in _TIMED:
                seconds = self._scheduler.manager.clock() - arrival.began
                self.rate.observe(max(1, arrival.arrived * self.block_bytes), seconds)
            for seq in self.moves.end(arrival):
                came = min(arrival.arrived, arrival.brings(self._scheduler.manager.usable(seq)))
                seq.arrived = range(arrival.first, arrival.first + came)
                self._scheduler.waiting.unpark(seq)  # or it has gone meanwhile
            for tell in arrival.watching:
                tell("" if outcome is PullOutcome.PULLED else outcome)

        self._post(end)

    def _fetch(self, hashes: ReadOnly[BlockHash], source: BlockSource) -> Arrival | None:
        start = self._start
        if start is None:
            return None
        arrival = self.moves.under_way(hashes)
        if arrival is not None:
            return _wanted(arrival)
        if self.moves.count(hashes) == len(hashes):
            return None
        scheduler = self._scheduler
        if not scheduler.cramped and len(self.moves.arrivals()) < MAX_ARRIVALS:
            arrival = self.moves.expect(hashes, scheduler.reserved_blocks())
        if arrival is None:
            self.outcomes[PullOutcome.NO_ROOM] += 1
            return None
        start(arrival, source)
        return arrival


def _wanted(arrival: Arrival | None) -> Arrival | None:
    """Whose last reader has gone is about to end: nobody joins it."""
    return None if arrival is None or arrival.stopped.is_set() else arrival
