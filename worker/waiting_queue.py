"""Whose prompt comes next: priority that ages, then fair shares, then first come, first served.

Sequences of one priority form a line. Its effective priority is the priority plus the age of its oldest
sequence over AGING_S, counted until its prompt is computed, and the line with the highest one is served: so
a line waits at most AGING_S per level longer than what is above it, and nothing starves. Within a line,
first whoever has an answer half given (it was preempted, or its worker was lost), then the tenant that was
served least (fair_share.py), and of that tenant the first to come. Aging ranks lines, not requests: were it
to rank requests, a tenant that queues fifty of them at once would soon be ahead of every newcomer.

Choices that share another sequence's prompt are held back until that prompt is computed. A sequence whose
prompt is on its way from another worker is parked until that has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvhive.proto.limits import MAX_PRIORITY
from kvhive.worker.fair_share import FairShare
from kvhive.worker.sequence import Sequence

AGING_S = 15.0
"""Waiting this long is worth one level of priority: batch work one level below interactive requests is
delayed by at most a quarter of a minute, twenty levels by five minutes."""


def clamped_priority(seq: Sequence) -> int:
    """Return a sequence's priority, within the limits that keep aging bounded."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, seq.priority))


class Ranking:
    """The order at one moment, of waiting sequences and of running ones whose prompts are not computed."""

    def __init__(self, now: float, oldest: dict[int, float], shares: FairShare) -> None:
        """`oldest` is, of each priority, the earliest `waiting_since` of those to be ranked."""
        self._lines = {
            priority: (-(priority + (now - since) / AGING_S), -priority) for priority, since in oldest.items()
        }
        self._shares = shares

    def of_line(self, priority: int) -> tuple[float, int]:
        """Return a line's rank; the smallest is served."""
        return self._lines[priority]

    def of(self, seq: Sequence) -> tuple[tuple[float, int], bool, int, int]:
        """Return a sequence's rank; the smallest goes first."""
        line = self._lines[clamped_priority(seq)]
        return line, not seq.returns, self._shares.served(seq.tenant), seq.ticket


@dataclass(slots=True)
class Backlog:
    """Some of the waiting sequences, and what is to be computed for them."""

    sequences: int = 0
    tokens: int = 0


class _Line:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.resumed: OrderedDict[str, Sequence] = OrderedDict()
        self.tenants: dict[str, OrderedDict[str, Sequence]] = {}

    def heads(self) -> Iterator[Sequence]:
        """Yield the first of every tenant, and all that return."""
        yield from self.resumed.values()
        yield from (next(iter(queue.values())) for queue in self.tenants.values())


class WaitingQueue:
    """The sequences that are not running. `oldest` and `first` are O(tenants + returning), the rest O(1)."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._members: dict[str, Sequence] = {}
        self._held: dict[str, list[Sequence]] = {}  # by the request_id of the sequence they wait for
        self._parked: set[str] = set()
        self.tokens = 0
        """Tokens of all members; one for a held choice, which will find the rest in the cache."""
        self.low, self.high = Backlog(), Backlog()
        """Of the members, those of a priority below 0, and those of one above 0."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._members.values()))

    def __contains__(self, seq: Sequence) -> bool:
        return self._members.get(seq.request_id) is seq

    @property
    def at_rest(self) -> bool:
        """Whether nobody here could run now: all are parked, or wait for somebody who is."""
        return not self._lines

    def backlog(self, sign: int, prefilling: Iterable[Sequence]) -> Backlog:
        """Return what waits, and what some running sequences lack, of the priorities of this sign."""
        waiting = self.high if sign > 0 else self.low
        lacking = sum(seq.remaining for seq in prefilling if seq.priority * sign > 0)
        return Backlog(waiting.sequences, waiting.tokens + lacking)

    def append(self, seq: Sequence) -> None:
        """Queue a newcomer."""
        self._enter(seq)
        self._queue_of(seq)[seq.request_id] = seq

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence before all others of its tenant, or of those that return if it is one."""
        self._enter(seq)
        queue = self._queue_of(seq)
        queue[seq.request_id] = seq
        queue.move_to_end(seq.request_id, last=False)

    def hold(self, seq: Sequence, leader: Sequence) -> None:
        """Keep a sequence back until the leader's prompt is computed, or the leader has ended."""
        self._enter(seq)
        self._held.setdefault(leader.request_id, []).append(seq)

    def park(self, seq: Sequence, incoming_tokens: int) -> None:
        """Take a member out of its line until `incoming_tokens` of its prompt have come."""
        self.remove(seq)
        seq.incoming_tokens = incoming_tokens
        self._enter(seq)
        self._parked.add(seq.request_id)

    def unpark(self, seq: Sequence) -> bool:
        """Put a parked member before the others of its tenant; False when it has gone."""
        if seq not in self or seq.request_id not in self._parked:
            return False
        self.remove(seq)
        self.put_back(seq)
        return True

    def release(self, leader: Sequence) -> None:
        """Let those go that waited for the leader: all when its prompt is there, else the first, to lead."""
        followers = self._held.pop(leader.request_id, [])
        if followers and not leader.prompt_ready:
            new_leader, *rest = followers
            if rest:
                self._held[new_leader.request_id] = rest
            followers = [new_leader]
        for seq in reversed(followers):  # to the front: they have waited as long as their leader
            self._leave(seq)
            self.put_back(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a member out, wherever it stands."""
        self._leave(seq)
        seq.incoming_tokens = 0
        if seq.request_id in self._parked:
            self._parked.discard(seq.request_id)
            return
        line = self._lines.get(clamped_priority(seq))
        queue = self._find(line, seq) if line else None
        if line is None or queue is None:
            for leader_id, followers in self._held.items():
                if seq in followers:
                    followers.remove(seq)
                    if not followers:
                        del self._held[leader_id]
                    return
            raise AssertionError(f"{seq.request_id} is a member and stands nowhere")
        del queue[seq.request_id]
        if not queue and queue is not line.resumed:
            del line.tenants[seq.tenant]
        if not line.tenants and not line.resumed:
            del self._lines[clamped_priority(seq)]

    def oldest(self) -> dict[int, float]:
        """Return, of each priority that has members, the earliest `waiting_since`."""
        return {
            priority: min(seq.waiting_since for seq in line.heads()) for priority, line in self._lines.items()
        }

    def first(self, ranking: Ranking) -> Sequence | None:
        """Return who is next; None when nobody is, or all are held."""
        if not self._lines:
            return None
        line = self._lines[min(self._lines, key=ranking.of_line)]
        return min(line.heads(), key=ranking.of)

    def _enter(self, seq: Sequence) -> None:
        self._members[seq.request_id] = seq
        self._count(seq, 1)

    def _leave(self, seq: Sequence) -> None:
        del self._members[seq.request_id]
        self._count(seq, -1)

    def _count(self, seq: Sequence, sign: int) -> None:
        tokens = sign * self._weight(seq)
        self.tokens += tokens
        if seq.priority:
            backlog = self.high if seq.priority > 0 else self.low
            backlog.sequences += sign
            backlog.tokens += tokens

    def _weight(self, seq: Sequence) -> int:
        return max(1, len(seq.tokens) - seq.incoming_tokens) if seq.after is None else 1

    def _queue_of(self, seq: Sequence) -> OrderedDict[str, Sequence]:
        line = self._lines.setdefault(clamped_priority(seq), _Line())
        return line.resumed if seq.returns else line.tenants.setdefault(seq.tenant, OrderedDict())

    def _find(self, line: _Line, seq: Sequence) -> OrderedDict[str, Sequence] | None:
        for queue in (line.resumed, line.tenants.get(seq.tenant)):
            if queue is not None and seq.request_id in queue:
                return queue
        return None
