"""Leases on blocks: what a pin keeps in the cache, for how long, and on whose budget.

A lease lasts `ttl_s` seconds after the last use of its block, whoever used it. It never runs out while the
block is live, and every release of the block renews it. Each leased block counts once, for the tenant that
asked for the longest keeping.

The cache stays prefix-closed whatever the order in which leases end, because along a chain they can only
end last block first: a pin covers every block before its end, so a parent's `ttl_s` is never the shorter
one, and whoever releases a child then releases its parent. Of leases that end together the deeper one does;
so where a release ends one, all that have ended by then go first.

A pin is kept whole or not at all: a promise that was not given holds nobody's budget.

Pins never make the pool unusable. Their budget is less than the pool, and a request that fits only without
the pinned blocks waits while others pass it (kept_out.py); no lease is granted or renewed then, so that
room is made as fast as promises allow, and after a minute it is refused.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class PinRefusal(StrEnum):
    """Why a pin is not kept."""

    OVER_BUDGET = "over_budget"
    """All tenants' pins together would hold more of the pool than they may."""
    OVER_TENANT_BUDGET = "over_tenant_budget"
    """The tenant's would."""
    MAKING_ROOM = "making_room"
    """Somebody waits for leases to end, so none begins."""


@dataclass(frozen=True, slots=True)
class PinBudget:
    """How much of a pool pins may hold. Raises ValueError for shares that would make the pool unusable."""

    share_in_all: float = 0.5
    """Of the pool's blocks, for all tenants together; 0 refuses every pin."""
    share_per_tenant: float = 0.25
    """Of the pool's blocks, for one tenant."""

    def __post_init__(self) -> None:
        for name, share in (("share_in_all", self.share_in_all), ("share_per_tenant", self.share_per_tenant)):
            if not 0 <= share < 1:
                raise ValueError(f"{name}: must be at least 0 and below 1, is {share:g}")


@dataclass(frozen=True, slots=True)
class ChainPin:
    """What keeps the beginning of a chain."""

    blocks: int
    ttl_s: float
    tenant: str


@dataclass(slots=True, eq=False)
class Lease:
    """One block's lease. `depth` is the block's place in its chain, 0 for the first."""

    block_id: int
    depth: int
    tenant: str
    ttl_s: float
    ends_at: float
    idle: bool = False
    """Whether nobody holds the block, so that the lease runs."""
    stops: int = 0
    """How often leases had ceased to be renewed when somebody last began to use the block."""
    queued: bool = False
    """Whether it has its one entry in the heap of ends."""
    ended: bool = False


class Leases:
    """The leases of one pool and their accounting. O(log n) per grant or release, O(1) when none has ended.

    All times are in seconds of the caller's clock.
    """

    def __init__(self, num_blocks: int, budget: PinBudget) -> None:
        self._num_blocks = num_blocks
        self.budget = budget
        self._renewing = True
        self._stops, self._stopped_at = 0, 0.0
        self._held: Counter[str] = Counter()
        self._total = 0
        # (end when it was queued, -depth, block id, lease). One entry per lease at most: a lease that was
        # renewed meanwhile is queued again when its old end comes up.
        self._ends: list[tuple[float, int, int, Lease]] = []

    @property
    def total(self) -> int:
        """Leased blocks, live and idle."""
        return self._total

    def held_by(self, tenant: str) -> int:
        """Leased blocks that count for a tenant."""
        return self._held[tenant]

    def renew(self, renewing: bool, now: float) -> None:
        """Say whether leases begin and are renewed. They are not while room is made for somebody who waits.

        What is in use when they cease to be was last used at that moment.
        """
        if self._renewing and not renewing:
            self._stops, self._stopped_at = self._stops + 1, now
        self._renewing = renewing

    def used(self, lease: Lease) -> None:
        """Somebody uses an idle block."""
        lease.idle, lease.stops = False, self._stops

    def refusal(self, tenant: str, new: int, charged: int) -> PinRefusal | None:
        """Say why a tenant may not lease `new` more blocks and be charged for `charged`; None when it may."""
        if not self._renewing:
            return PinRefusal.MAKING_ROOM
        if charged and self._held[tenant] + charged > int(self._num_blocks * self.budget.share_per_tenant):
            return PinRefusal.OVER_TENANT_BUDGET
        if new and self._total + new > int(self._num_blocks * self.budget.share_in_all):
            return PinRefusal.OVER_BUDGET
        return None

    def grant(self, lease: Lease | None, asked: Lease) -> Lease:
        """Lease a live block, whose present lease is `lease`, unless that is as good; return what it has now.

        The caller has asked `refusal`.
        """
        if lease is not None and lease.ttl_s >= asked.ttl_s:
            return lease
        if lease is None:
            self._charge(asked.tenant, 1)
            asked.stops = self._stops
            return asked
        self._charge(lease.tenant, -1)
        self._charge(asked.tenant, 1)
        lease.tenant, lease.ttl_s = asked.tenant, asked.ttl_s
        lease.ends_at = max(lease.ends_at, asked.ends_at)
        return lease

    def released(self, lease: Lease, now: float, idle: bool) -> bool:
        """A user of the block has gone, the last one when `idle`. False: the lease is over."""
        if self._renewing:
            lease.ends_at = max(lease.ends_at, now + lease.ttl_s)
        elif lease.stops < self._stops:
            lease.ends_at = max(lease.ends_at, self._stopped_at + lease.ttl_s)
        if not idle:
            return True
        if lease.ends_at <= now:
            self.end(lease)
            return False
        lease.idle = True
        self._queue(lease)
        return True

    def due(self, now: float) -> Iterator[int]:
        """End the idle leases whose time has come and yield their blocks, children before parents."""
        while self._ends and self._ends[0][0] <= now:
            queued_end, _, _, lease = heapq.heappop(self._ends)
            lease.queued = False
            if lease.ended or not lease.idle:
                continue  # a live block's lease is queued again by its release
            if lease.ends_at > queued_end:
                self._queue(lease)
                continue
            self.end(lease)
            yield lease.block_id

    def end(self, lease: Lease) -> None:
        """Give a lease's budget back."""
        assert not lease.ended, f"the lease of block {lease.block_id} ended twice"
        lease.ended = True
        self._charge(lease.tenant, -1)

    def forget_ended(self) -> None:
        """Drop queued entries of ended leases, after many ended at once."""
        self._ends = [entry for entry in self._ends if not entry[3].ended]
        heapq.heapify(self._ends)

    def _charge(self, tenant: str, blocks: int) -> None:
        self._total += blocks
        self._held[tenant] += blocks
        if not self._held[tenant]:
            del self._held[tenant]

    def _queue(self, lease: Lease) -> None:
        if not lease.queued:
            lease.queued = True
            heapq.heappush(self._ends, (lease.ends_at, -lease.depth, lease.block_id, lease))
