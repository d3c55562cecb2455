"""Who still gets a place where places are short: one rule, for a router's requests and for a worker's queue.

Most requests meet the limit itself. A priority below 0 meets it an eighth earlier, one above 0 an eighth
later; and a tenant that holds less than the mean of all who hold places, a quarter later. So what matters
least is refused first, and no tenant, whatever priority it claims, can take the last places from the others:
its own flood has put it above the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 8
"""The limit is moved by eighths."""


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds places now."""

    places: int
    """That the newcomer's tenant holds."""
    tenants: int
    """That hold any, the newcomer's among them."""
    total: int
    """Places that are held by all."""


def most_places(limit: int, priority: int, held: Held) -> int:
    """Return how many places may be held, this one included: `limit`, moved by up to three eighths."""
    eighths = STEP + (priority > 0) - (priority < 0)
    if held.places * held.tenants < held.total:
        eighths += 2
    return max(min(limit, 1), limit * eighths // STEP)
