"""Requests that wait in the router because no worker serves: at zero workers, or while all restart.

There is no other queue here. Workers order what waits by priority, fair shares and age, and know what was
computed for whom; a second queue in front of them would only hide from the policy what is to be done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhive.proto.admission import Held, most_places
from kvhive.proto.errors import Unavailable

POLL_S = 0.05
"""How often to look for a worker while somebody waits for one."""
RETRY_S = 5.0
"""When to try again where there is no worker: nobody can know when there will be one."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One that waits. `since` is when its request came, in seconds of any clock."""

    tenant: str
    priority: int
    since: float
    promised: bool = False
    """Whether a worker had it already: then it is held however many others are."""
    released: asyncio.Future[None] = field(init=False)


class HeldRequests:
    """Bounded in count and in seconds. Lives on one event loop."""

    def __init__(self, limit: int, longest_s: float, serving: Callable[[], bool]) -> None:
        """Hold up to `limit` requests for up to `longest_s` seconds each, until `serving` says yes."""
        self._limit = limit
        self.longest_s = longest_s
        self._serving = serving
        self._waiting: list[Waiting] = []
        self._watch: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, waiting: Waiting, within_s: float) -> bool:
        """Wait for a worker, and for those who go before; False when that takes `within_s` seconds.

        Raises Unavailable where nobody may be held, or as many are as may be.
        """
        own = sum(other.tenant == waiting.tenant for other in self._waiting)
        tenants = len({waiting.tenant, *(other.tenant for other in self._waiting)})
        most = most_places(self._limit, waiting.priority, Held(own, tenants, len(self)))
        if not waiting.promised and len(self) >= most:
            raise Unavailable(
                f"no worker is serving now, and {len(self)} requests wait for one, the limit is {most}",
                cause="held_full",
                retry_after_s=RETRY_S,
            )
        waiting.released = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._release())
        try:
            async with asyncio.timeout(within_s):
                await waiting.released
        except TimeoutError:
            return False
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return True

    async def _release(self) -> None:
        """Let all go as soon as somebody serves; whoever finds no place comes back."""
        while self._waiting:
            if self._serving():
                ready, self._waiting = in_turn(self._waiting), []
                for each in ready:
                    if not each.released.done():
                        each.released.set_result(None)
            await asyncio.sleep(POLL_S)


def in_turn(waiting: list[Waiting]) -> list[Waiting]:
    """Return them in the order in which they may go: by priority, then tenants in turn, then by age."""
    turns: Counter[tuple[int, str]] = Counter()
    ranked: list[tuple[int, int, float, Waiting]] = []
    for each in sorted(waiting, key=lambda each: (-each.priority, each.since)):
        turns[each.priority, each.tenant] += 1
        ranked.append((-each.priority, turns[each.priority, each.tenant], each.since, each))
    return [each for *_, each in sorted(ranked, key=lambda rank: rank[:3])]
