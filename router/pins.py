"""What a request asks a worker to keep, what became of it, and how its input is billed where caching is.

A pin is of full blocks. One that is shorter than a block, or than the configured minimum, asks nothing of the
worker, and is kept only where a longer one of the same request covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvhive.router.frontend import KeptPrefix, Usage
from kvhive.router.request import PromptPin

BELOW_MINIMUM = "below_minimum"
OVER_BUDGET = "over_budget"


@dataclass(frozen=True, slots=True)
class AskedPin:
    """One pin of a request."""

    tokens: int
    """Of the full blocks that it is of; 0: there is none."""
    ttl_s: float
    long_enough: bool
    """Whether a worker is asked to keep it."""


def asked_pins(pins: Sequence[PromptPin], block_size: int, min_tokens: int) -> tuple[AskedPin, ...]:
    """Measure the pins of a prompt, each of which says of how many tokens it is, in their order."""
    asked = []
    for pin in pins:
        assert pin.tokens is not None, "a prepared prompt says of how many tokens each pin is"
        tokens = pin.tokens // block_size * block_size
        asked.append(AskedPin(tokens, pin.ttl_s, tokens >= max(1, min_tokens)))
    return tuple(asked)


def worker_pins(pins: Sequence[AskedPin]) -> dict[int, float]:
    """Return what a worker is asked for: the longest time for each number of tokens."""
    asked: dict[int, float] = {}
    for pin in pins:
        if pin.long_enough:
            asked[pin.tokens] = max(pin.ttl_s, asked.get(pin.tokens, 0.0))
    return asked


def kept_prefixes(
    pins: Sequence[AskedPin], pinned_tokens: int, refused: str
) -> tuple[tuple[KeptPrefix, ...], str]:
    """Say of each pin whether it is kept, and in one word why the first that is not is not.

    pinned_tokens, refused: what the worker answered
    """
    kept = {tokens: ttl_s for tokens, ttl_s in worker_pins(pins).items() if tokens <= pinned_tokens}
    prefixes = []
    for pin in pins:
        covered = any(tokens >= pin.tokens and ttl_s >= pin.ttl_s for tokens, ttl_s in kept.items())
        why = (refused or OVER_BUDGET) if pin.long_enough else BELOW_MINIMUM
        is_kept = covered and pin.tokens > 0
        prefixes.append(KeptPrefix(pin.tokens, pin.ttl_s, is_kept, "" if is_kept else why))
    return tuple(prefixes), next((prefix.not_kept for prefix in prefixes if not prefix.kept), "")


class CacheSplit(NamedTuple):
    """A prompt's tokens by what the cache had to do with them. Together they are the whole prompt."""

    read: int
    """Found in the worker's cache or pulled from another's, kept or not."""
    created: dict[float, int]
    """Computed by this request, and kept: by how many seconds. The longest time counts."""
    plain: int
    """The rest."""


def cache_split(usage: Usage) -> CacheSplit:
    """Split a request's input the way that hosted APIs bill it.

    What came from another worker's cache was read from a cache, too: nothing was computed for it.
    What another request wrote at the same moment is not this one's: plain.
    """
    kept = [prefix for prefix in usage.kept if prefix.kept]
    created: dict[float, int] = {}
    start, new = usage.read_tokens, usage.written_tokens
    for end in sorted({prefix.tokens for prefix in kept}):
        ttl_s = max(prefix.ttl_s for prefix in kept if prefix.tokens >= end)
        tokens = min(new, max(0, end - start))
        if tokens:
            created[ttl_s] = created.get(ttl_s, 0) + tokens
        start, new = max(start, end), new - tokens
    plain = usage.prompt_tokens - usage.read_tokens - sum(created.values())
    return CacheSplit(usage.read_tokens, created, plain)
