"""How many drafts a sequence is worth now: as many as give it the most tokens per second.

Of k drafts, each right with probability a if those before it were, a step keeps

    tokens(k) = 1 + a + a² + ... + a^k

and in a batch of b sequences it takes this one's part of the step's seconds,

    seconds(k) = (base + k * per_draft) / b + (1 + k) * per_token

With full batches, slow drafters or bad guesses the best k is 0. Then a draft is tried again now and then,
ever more rarely while it keeps failing, because output changes: prose may turn into a quoted table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvhive.worker.sequence import Sequence
from kvhive.worker.speculation_costs import StepCosts

REMEMBERED_SEQUENCES = 4096
"""As many as a worker may run at once; what is forgotten starts again from the worker's average."""
DECAY = 0.9
"""Weight of a step's outcome after one more: about ten steps of memory."""
WORKER_DECAY = 0.98
"""The same for the worker's average, over the steps of all its sequences."""
PRIOR_WEIGHT = 2.0
"""Drafts' worth of trust in the worker's average, against what a sequence has shown itself."""
FIRST_GUESS = 0.7
"""Acceptance before anything was seen: high enough to try."""
FIRST_PROBE = 16
"""Steps without drafts before the first probe; doubled after each one that did not pay."""
LAST_PROBE = 256
"""Then a probe's extra draft is under half a percent of a step."""


@dataclass(slots=True)
class _Record:
    """What one sequence has shown."""

    drafted: int = 0
    accepted: int = 0
    tried: float = 0.0
    """Decayed count of drafts whose predecessors were right."""
    right: float = 0.0
    quiet: int = 0
    wait: int = FIRST_PROBE


class SpeculationControl:
    """Chooses the number of drafts per sequence and step. Pure arithmetic on what it is shown: no clock."""

    def __init__(self, max_drafts: int, costs: Callable[[], StepCosts]) -> None:
        self._max_drafts = max_drafts
        self._costs = costs
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._tried = PRIOR_WEIGHT
        self._right = PRIOR_WEIGHT * FIRST_GUESS

    @property
    def acceptance(self) -> float:
        """The worker's recent share of right drafts among those whose predecessors were right."""
        return self._right / self._tried

    def drafts_for(self, seq: Sequence) -> int:
        """Return how many drafts the sequence's next step may try. To be asked once per step."""
        if not seq.sampling.speculate:
            return 0
        record = self._record(seq)
        probed = self._learn(record, seq)
        best = self._best(record)
        if best:
            record.quiet, record.wait = 0, FIRST_PROBE
            return best
        if probed:
            record.quiet, record.wait = 0, min(2 * record.wait, LAST_PROBE)
        record.quiet += 1
        return int(record.quiet > record.wait)  # and on, until the drafter had an idea to be judged by

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.request_id)
        if record is None or record.drafted > seq.drafted:  # another sequence of the same name
            record = self._records[seq.request_id] = _Record(seq.drafted, seq.accepted)
        self._records.move_to_end(seq.request_id)
        if len(self._records) > REMEMBERED_SEQUENCES:
            self._records.popitem(last=False)
        return record

    def _learn(self, record: _Record, seq: Sequence) -> bool:
        drafted, accepted = seq.drafted - record.drafted, seq.accepted - record.accepted
        if not drafted:
            return False
        record.drafted, record.accepted = seq.drafted, seq.accepted
        tried = accepted + (accepted < drafted)  # what stands behind the first wrong draft was never judged
        record.tried = DECAY * record.tried + tried
        record.right = DECAY * record.right + accepted
        self._tried = WORKER_DECAY * self._tried + tried
        self._right = WORKER_DECAY * self._right + accepted
        return True

    def _best(self, record: _Record) -> int:
        costs = self._costs()
        right = record.right + PRIOR_WEIGHT * self.acceptance
        chance = right / (record.tried + PRIOR_WEIGHT)
        best, best_rate, tokens, reach = 0, 0.0, 0.0, 1.0
        for drafts in range(self._max_drafts + 1):
            tokens += reach
            reach *= chance
            shared = (costs.base_s + drafts * costs.per_draft_s) / costs.batch
            rate = tokens / max(shared + (1 + drafts) * costs.per_token_s, 1e-9)
            if rate > best_rate:
                best, best_rate = drafts, rate
        return best
