"""Several requests answered as one: their choices numbered through, their usage added up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvhive.router.frontend import Delta, Finished, GenerationEvent, Usage
from kvhive.router.merged_streams import merged


async def joined(
    streams: Sequence[AsyncGenerator[GenerationEvent, None]], n: int
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events after Started of generations of `n` choices each, as of one of all their choices.

    The first generation's choices come first. The first error ends them all. Closing this closes them.
    """
    usages: list[Usage] = []
    async with aclosing(merged(streams, first_alone=False)) as items:
        async for stream, event in items:
            match event:
                case Delta(choice=choice):
                    yield replace(event, choice=stream * n + choice)
                case Finished(reason, usage, choice):
                    usages += [] if usage is None else [usage]
                    last = usage is not None and len(usages) == len(streams)
                    yield Finished(reason, total_usage(usages) if last else None, stream * n + choice)


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum; workers and reasons are listed, each once, in the order of their first end."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        pulled_tokens=sum(usage.pulled_tokens for usage in usages),
        reachable_tokens=sum(usage.reachable_tokens for usage in usages),
        written_tokens=sum(usage.written_tokens for usage in usages),
        worker_id=listed(usage.worker_id for usage in usages),
        route_reason=listed(usage.route_reason for usage in usages),
        failovers=sum(usage.failovers for usage in usages),
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        kept=tuple(prefix for usage in usages for prefix in usage.kept),
        not_kept=listed(usage.not_kept for usage in usages if usage.not_kept),
    )


def listed(names: Iterable[str]) -> str:
    """Return names as a list for people and headers, each once."""
    return ",".join(dict.fromkeys(names))
