"""Open-loop load on a cluster under faults, and the judgement of every answer.

Requests come when they come, whatever became of those before. A client asks one of the routers; what says
"retry", or breaks off because its router was struck, is asked again of another one, until its deadline. Each
attempt is held to the same promise: a complete and correct answer, or one clear error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvhive.scripts.chaos_awake import AwakeTime
from kvhive.scripts.chaos_client import Ending, OutsideClient, backoff
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_work import Transcript, Work, stopped

log = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""After this long a request has failed, however loaded the machine is."""
HANG_S = 20.0
"""Who has heard nothing for so long at the deadline, while we listened, was forgotten; others are late."""
DARK_S = 10.0
"""A request that begins so soon after a moment without any worker need not be answered."""
DEAF_S = 10.0
"""Whom the machine did not run for so long, a router may take for somebody who never asks (after 20 s)."""
LEARNED_AT_ONCE = 8
MOST_IN_FLIGHT = 64
MOST_VIOLATIONS = 100
"""Kept in words; all are counted."""


class Manner(StrEnum):
    """How a request is asked."""

    PATIENT = "patient"
    LEAVING = "leaving"
    """Its client goes away in the middle."""
    HURRIED = "hurried"
    """With a deadline that it may well miss."""
    PREWARM = "prewarm"


_SHARES = {Manner.PATIENT: 82, Manner.LEAVING: 8, Manner.HURRIED: 6, Manner.PREWARM: 4}


@dataclass(slots=True)
class Tally:
    """What became of the load."""

    requests: int = 0
    """Patient ones, while at least one worker was left."""
    answered: int = 0
    at_first: int = 0
    """Of those, at the first attempt."""
    in_the_dark: int = 0
    """Patient ones when no worker was left."""
    held_back: int = 0
    """Not sent, because MOST_IN_FLIGHT were on their way."""
    manners: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """By the first words of what was said."""
    slowest_s: float = 0.0
    stood_still_s: float = 0.0
    """So long the machine had no time for this process, which was then deaf."""
    violation_count: int = 0
    violations: list[str] = field(default_factory=list)

    def violated(self, what: str) -> None:
        """Something happened that never may."""
        self.violation_count += 1
        log.warning("violation: %s", what[:1000])
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(what[:1000])


class Mark(NamedTuple):
    """How things were when an attempt began."""

    struck: int
    """A Trouble's mark."""
    lost_s: float
    """An AwakeTime's."""


class Load:
    """Asks for `work` through the routers of `clients`. Lives on one event loop."""

    def __init__(
        self, clients: Sequence[OutsideClient], work: Sequence[Work], trouble: Trouble, seed: str
    ) -> None:
        self._clients = list(clients)
        self._work = list(work)
        self._trouble = trouble
        self._chance = random.Random(f"load {seed}")
        self._expected: dict[int, Transcript] = {}
        self._in_flight: set[asyncio.Task[None]] = set()
        self._awake = AwakeTime()
        self.tally = Tally()

    async def learn(self) -> None:
        """Ask for everything once without any fault: these are the answers. Raises RuntimeError."""
        turns = asyncio.Semaphore(LEARNED_AT_ONCE)

        async def learn(place: int, work: Work) -> None:
            async with turns:
                answer = await self._plain(work)
                if work.kind == "stop":
                    self._work[place] = stopped(work, answer)
                    answer = await self._plain(self._work[place])
                self._expected[work.number] = answer

        await asyncio.gather(*(learn(place, work) for place, work in enumerate(self._work)))

    async def _plain(self, work: Work) -> Transcript:
        seen = Transcript(work)
        ending, said = await self._clients[0].ask(work, DEADLINE_S, seen)
        problems = [*seen.problems, *([] if seen.whole else ["it is not whole"])]
        if ending is not Ending.ANSWERED or problems:
            raise RuntimeError(f"without any fault, {work.kind} {ending.value}: {said} {problems}")
        return seen

    async def run(self, per_second: float) -> None:
        """Send until cancelled."""
        while True:
            await asyncio.sleep(self._chance.expovariate(per_second))
            if len(self._in_flight) >= MOST_IN_FLIGHT:
                self.tally.held_back += 1
                continue
            task = asyncio.create_task(self._one())
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def drained(self) -> None:
        """Wait until all that was sent has ended, as all does by its deadline."""
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        self.tally.stood_still_s = round(self._awake.lost_s, 1)

    async def keep_time(self) -> None:
        """Count in how much of it this process runs, until cancelled."""
        await self._awake.run()

    async def _one(self) -> None:
        work = self._chance.choice(self._work)
        [manner] = self._chance.choices(list(_SHARES), list(_SHARES.values()))
        if manner is Manner.HURRIED and work.by_http:
            manner = Manner.LEAVING  # that door knows no deadlines
        self.tally.manners[manner.value] += 1
        if manner is Manner.PATIENT:
            await self._patiently(work)
            return
        client, seen = self._chance.choice(self._clients), Transcript(work, self._awake)
        mark = self._mark(client)
        if manner is Manner.PREWARM:
            ending, said = await client.prewarm(work, DEADLINE_S)
        elif manner is Manner.LEAVING:
            ending, said = await client.ask_and_leave(work, self._chance.expovariate(2.0), seen)
        else:
            ending, said = await client.ask(work, self._chance.uniform(0.02, 1.0), seen)
        hurried = manner is Manner.HURRIED
        if manner is Manner.PREWARM and ending is Ending.ANSWERED:
            return
        self._judge(work, client, mark, (ending, said), seen, may_expire=hurried)

    async def _patiently(self, work: Work) -> None:
        began = time.monotonic()
        darkness, dark = self._trouble.blackouts, self._trouble.dark_within(DARK_S)
        attempt, client = 0, self._chance.choice(self._clients)
        answered = False
        while not answered and (left := DEADLINE_S - (time.monotonic() - began)) > 0:
            if attempt:
                await asyncio.sleep(backoff(attempt, self._chance))
                client = self._clients[(self._clients.index(client) + 1) % len(self._clients)]
            mark, seen = self._mark(client), Transcript(work, self._awake)
            result = await client.ask(work, left, seen)
            self._judge(work, client, mark, result, seen)
            answered = result[0] is Ending.ANSWERED
            attempt += 1
        took = time.monotonic() - began
        self.tally.slowest_s = max(self.tally.slowest_s, took)
        if dark or self._trouble.blackouts != darkness:
            self.tally.in_the_dark += 1
            return
        self.tally.requests += 1
        self.tally.answered += answered
        self.tally.at_first += answered and attempt == 1

    def _mark(self, client: OutsideClient) -> Mark:
        return Mark(self._trouble.mark(client.name), self._awake.lost_s)

    def _judge(
        self,
        work: Work,
        client: OutsideClient,
        mark: Mark,
        result: tuple[Ending, str],
        seen: Transcript,
        may_expire: bool = False,
    ) -> None:
        """Hold an attempt to the promise."""
        ending, said = result
        self.tally.attempts[ending.value] += 1
        where = f"{work.kind} {work.number} by {client.name}"
        for difference in seen.differences(self._expected[work.number], ending is Ending.ANSWERED):
            self.tally.violated(f"{where}, {ending.value}: {difference}")
        if ending not in (Ending.ANSWERED, Ending.LEFT):
            log.info("%s: %s: %s; %s", where, ending.value, said, seen.progress)
        if ending is Ending.REFUSED:
            self.tally.refusals[_gist(said)] += 1
        if ending is Ending.EXPIRED and not may_expire and seen.silent_s > HANG_S:
            self.tally.violated(f"{where}: no answer and no error in time: {said}; {seen.progress}")
        if ending is Ending.BROKEN or ending is Ending.WRONG:
            self.tally.refusals[f"{ending.value}: {_gist(said)}"] += 1
            deaf_s = self._awake.lost_s - mark.lost_s
            if self._trouble.quiet_since(client.name, mark.struck) and deaf_s < DEAF_S:
                self.tally.violated(f"{where}: {ending.value}: {said}")


def _gist(said: str) -> str:
    """What an error says, without the numbers and names that make each one another."""
    return "".join("#" if c.isdigit() else c for c in said)[:80]
