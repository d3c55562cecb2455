"""`cache_control` on tools, blocks and bodies: up to where the prompt is to stay cached, and for how long.

Markers are counted and ordered as they stand in the prompt: tools, system, messages. How far a lookup looks
back has no limit here: every full block of a prompt is found by its hash, with or without a marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.fields import Fields
from kvhive.router.chat.messages import CacheBreakpoint

MAX_MARKERS = 4
"""As Anthropic has it."""
TTLS = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"


def ttl_of(owner: Fields) -> str | None:
    """Return the TTL that an object's cache_control asks for, or None. Raises InvalidRequest."""
    fields = owner.child("cache_control")
    if fields is None:
        return None
    fields.one_of("type", ("ephemeral",))
    ttl: str = fields.take("ttl", str, DEFAULT_TTL)
    if ttl not in TTLS:
        raise InvalidRequest(fields.path("ttl"), f"must be one of {', '.join(TTLS)}, is {ttl[:16]!a}")
    fields.close()
    return ttl


class Markers:
    """The markers of one body, noted in the order of the prompt."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, CacheBreakpoint]] = []

    def note(self, ttl: str, where: str, message: int | None, chars: int | None = None) -> None:
        """Note a marker and where its block ends. Raises InvalidRequest for one too many or too long."""
        self._add(ttl, f"{where}.cache_control", where, CacheBreakpoint(TTLS[ttl], message, chars))

    def note_whole(self, ttl: str, where: str, message: int, chars: int | None) -> None:
        """Note the body's own marker: on its last block, unless that has the same. Raises as `note`."""
        if self._noted and self._noted[-1][0] == where:
            if self._noted[-1][1].ttl_s != TTLS[ttl]:
                raise InvalidRequest("cache_control.ttl", f"must be the same as that of {where}, is {ttl}")
            return
        self._add(ttl, "cache_control", where, CacheBreakpoint(TTLS[ttl], message, chars))

    def _add(self, ttl: str, field: str, where: str, point: CacheBreakpoint) -> None:
        if len(self._noted) == MAX_MARKERS:
            raise InvalidRequest(field, f"must be at most {MAX_MARKERS} times in a body, is one more")
        if self._noted and point.ttl_s > self._noted[-1][1].ttl_s:
            raise InvalidRequest(
                f"{field}.ttl",
                f"must not be longer than that of {self._noted[-1][0]}, which stands before it "
                f"(tools, then system, then messages), is {ttl}",
            )
        self._noted.append((where, point))

    def breakpoints(self, whole: Sequence[int | None]) -> tuple[CacheBreakpoint, ...]:
        """Return one for each place, in the order of the prompt.

        `whole` has, for each message, how many characters are all of it; None: it has more than text. Where
        several markers fall on one place, such as those of several tools, the longest TTL is meant.
        """
        places: dict[tuple[int, float], CacheBreakpoint] = {}
        for _, point in self._noted:
            message = -1 if point.message is None else point.message
            chars = point.chars
            if point.message is not None and chars == whole[point.message]:
                chars = None  # and so its turn's end, too
            place = message, math.inf if chars is None else chars
            known = places.get(place)
            if known is None or known.ttl_s < point.ttl_s:
                places[place] = CacheBreakpoint(point.ttl_s, point.message, chars)
        return tuple(places[place] for place in sorted(places))
