"""In whose name a request is made, known wherever it runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from kvhive.proto.limits import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key."""

    name: str
    """Also the tenant of all its requests."""
    namespace: str = ""
    """Keys of one namespace share cached blocks; empty: this one shares with nobody."""
    max_priority: int = MAX_PRIORITY
    """A higher priority is lowered to it."""
    admin: bool = False
    """May look at the whole cluster."""


OPERATOR = Principal("kvhive:operator", admin=True)
"""Whoever can read the cluster's state file. No key of a file has a name with a colon."""

asking: ContextVar[Principal | None] = ContextVar("asking", default=None)
"""Set by the guard of the door that a request came through; None where no guard has seen it."""
