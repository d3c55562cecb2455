"""Which survivor inherits which of a worker's hot chains: pure, so that it can be reasoned about.

A chain costs a survivor the blocks of it that it lacks. Chains that begin alike are cheapest side by side,
and on one survivor alone they would make all their requests go there: both count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhive.proto.block_hash import BlockKey

IMBALANCE = 0.5
"""A block that a survivor was promised already weighs so much of a block that would have to be copied."""


@dataclass(slots=True)
class Heir:
    """A survivor, and what it is to have."""

    worker_id: str
    room: int
    """Blocks it may be given: more would push out what it needs itself."""
    has: set[BlockKey] = field(default_factory=set)
    """What it holds or was promised, as far as that is known."""
    promised: int = 0
    """Blocks it was promised."""

    def lacks(self, chain: Sequence[BlockKey]) -> int:
        """Return how many blocks of a chain, after the leading ones that it has, it would have to get."""
        for held, key in enumerate(chain):
            if key not in self.has:
                return len(chain) - held
        return 0


def _price(offer: tuple[int, Heir]) -> tuple[float, str]:
    lacks, heir = offer
    return lacks + IMBALANCE * heir.promised, heir.worker_id


def share_out(chains: Sequence[Sequence[BlockKey]], heirs: Sequence[Heir]) -> list[str]:
    """Name an heir for each chain, hottest first; empty where nobody has room. Changes the heirs.

    O(chains x heirs x blocks of a chain).
    """
    named = []
    for chain in chains:
        fitting = [(heir.lacks(chain), heir) for heir in heirs]
        fitting = [(lacks, heir) for lacks, heir in fitting if lacks <= heir.room - heir.promised]
        if not fitting:
            named.append("")
            continue
        lacks, heir = min(
            fitting, key=lambda each: (each[0] + IMBALANCE * each[1].promised, each[1].worker_id)
        )
        heir.promised += lacks
        heir.has.update(chain)
        named.append(heir.worker_id)
    return named
