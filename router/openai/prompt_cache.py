"""What a body says of the prompt's cache: OpenAI's prompt_cache_options, _breakpoint and _retention.

Prompts are cached without any of it, as far as there is room. A breakpoint with a lifetime is a promise
beyond that: up to it the prompt is kept for so long after its last use. So `explicit` without breakpoints
promises nothing, and prevents nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_PIN_TTL_S
from kvhive.router.chat.messages import CacheBreakpoint
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.field_policy import GivenFields, refuse_others
from kvhive.router.request import PromptPin

MAX_WRITTEN = 4
"""Breakpoints that one request keeps, the implicit one included; of more, the last ones."""
DEFAULT_TTL_S = 1800.0
"""Of an explicit breakpoint that says nothing else."""
MAX_MARKERS = 1024
"""Explicit breakpoints in one body: read, but for the last ones, to no effect."""
_MODES = ("implicit", "explicit")
_RETENTIONS = ("in_memory", "in-memory", "24h")
_TTL = re.compile("([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Marker:
    """An explicit breakpoint."""

    message: int
    chars: int | None
    """See CacheBreakpoint."""
    ttl_s: float | None
    """None: the request's."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a body says of all its breakpoints."""

    explicit: bool = False
    """Whether the prompt's end is none of them."""
    ttl_s: float | None = None
    prewarm: bool = False

    @property
    def implicit_ttl_s(self) -> float | None:
        """How long the whole prompt is to be kept; None: as it comes, for nobody asked."""
        return None if self.explicit else self.ttl_s


def read_cache_options(given: GivenFields) -> CacheOptions:
    """Return the options. Raises InvalidRequest."""
    retention: str | None = typed(given, "prompt_cache_retention", str, None)
    if retention is not None:
        if retention not in _RETENTIONS:
            raise InvalidRequest(
                "prompt_cache_retention", f"must be in_memory or 24h, is {spell_text(retention)}"
            )
        given.ignore("prompt_cache_retention")  # it is an upper bound, and nothing is kept on a disk
    options: dict[str, Any] = typed(given, "prompt_cache_options", dict, {})
    name = "prompt_cache_options"
    refuse_others(name, options, frozenset({"mode", "ttl", "prewarm"}))
    mode, ttl, prewarm = options.get("mode"), options.get("ttl"), options.get("prewarm")
    if mode is not None and mode not in _MODES:
        shown = spell_text(mode) if isinstance(mode, str) else json_type(mode)
        raise InvalidRequest(f"{name}.mode", f"must be implicit or explicit, is {shown}")
    if prewarm is not None and not isinstance(prewarm, bool):
        raise InvalidRequest(f"{name}.prewarm", f"must be a boolean, is {json_type(prewarm)}")
    return CacheOptions(
        mode == "explicit", None if ttl is None else _seconds(f"{name}.ttl", ttl), bool(prewarm)
    )


def read_marker(where: str, marker: object, message: int, chars: int | None) -> Marker:
    """Return an explicit breakpoint of a part. Raises InvalidRequest."""
    if not isinstance(marker, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(marker)}")
    refuse_others(where, marker, frozenset({"mode", "ttl"}))
    mode, ttl = marker.get("mode"), marker.get("ttl")
    if mode != "explicit":
        shown = spell_text(mode) if isinstance(mode, str) else json_type(mode)
        raise InvalidRequest(f"{where}.mode", f"must be 'explicit', is {shown}")
    return Marker(message, chars, None if ttl is None else _seconds(f"{where}.ttl", ttl))


def breakpoints(
    given: GivenFields, options: CacheOptions, markers: Sequence[Marker], messages: int
) -> tuple[CacheBreakpoint, ...]:
    """Return what of a conversation is to stay cached, in the order of the prompt. Raises InvalidRequest."""
    if len(markers) > MAX_MARKERS:
        raise InvalidRequest(
            "prompt_cache_breakpoint", f"must be at most {MAX_MARKERS} in a request, is {len(markers)}"
        )
    if options.explicit and not markers:
        given.ignore("prompt_cache_options.mode")
    default = DEFAULT_TTL_S if options.ttl_s is None else options.ttl_s
    points = [
        CacheBreakpoint(default if marker.ttl_s is None else marker.ttl_s, marker.message, marker.chars)
        for marker in markers
    ]
    if options.implicit_ttl_s is not None and messages:
        ttl_s = options.implicit_ttl_s
        if points and (points[-1].message, points[-1].chars) == (messages - 1, None):
            ttl_s = max(ttl_s, points.pop().ttl_s)  # one place, one breakpoint
        points.append(CacheBreakpoint(ttl_s, messages - 1))
    return tuple(points[-MAX_WRITTEN:])


def prompt_pins(given: GivenFields, options: CacheOptions) -> tuple[PromptPin, ...]:
    """Return what of a prompt without parts is to stay cached: all of it, or nothing."""
    if options.explicit:
        given.ignore("prompt_cache_options.mode")
    return () if options.implicit_ttl_s is None else (PromptPin(options.implicit_ttl_s),)


def _seconds(where: str, ttl: object) -> float:
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_PIN_TTL_S:
        shown = spell_text(ttl) if isinstance(ttl, str) else json_type(ttl)
        raise InvalidRequest(
            where, f"must be like 30m, with s, m or h, and at most {MAX_PIN_TTL_S / 3600:g}h, is {shown}"
        )
    return float(seconds)
