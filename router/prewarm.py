"""Prewarming: a prompt's beginning in the caches of several workers, before anybody asks.

It is a generation of one token that nobody reads: the first worker finds or computes the prompt, and each
further one pulls it from there, or computes what does not come. A worker gives its first token after the
prompt's blocks have their hashes and their leases, so that token is the acknowledgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias

from kvhive.proto.errors import InvalidRequest, Unavailable
from kvhive.proto.limits import MAX_PIN_TTL_S
from kvhive.router.chat.messages import CacheBreakpoint, ChatPrompt
from kvhive.router.field_checks import check_above_zero
from kvhive.router.frontend import Finished, GenerationEvent, Started, Usage
from kvhive.router.request import GenerateRequest, PromptPin
from kvhive.router.sampling_params import SamplingParams

MAX_PREWARMED = 64
"""Most workers of one call."""

Run: TypeAlias = AsyncGenerator[GenerationEvent, None]
"""One generation's events."""

Begin: TypeAlias = Callable[[GenerateRequest, set[str], str], Awaitable[Run]]
"""Prepares a generation that avoids some workers, and pulls from one (empty: from nobody)."""


def keeping(request: GenerateRequest, ttl_s: float) -> GenerateRequest:
    """Return the same request, with its whole prompt to be kept, too. Raises InvalidRequest."""
    check_above_zero("ttl_s", ttl_s, MAX_PIN_TTL_S)
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return replace(request, pins=(*request.pins, PromptPin(ttl_s)))
    end = CacheBreakpoint(ttl_s, message=len(prompt.messages) - 1)
    return replace(request, prompt=replace(prompt, breakpoints=(*prompt.breakpoints, end)))


async def prewarmed(request: GenerateRequest, workers: int, begin: Begin) -> list[Usage]:
    """See TokenizingFrontend.prewarm."""
    if not 1 <= workers <= MAX_PREWARMED:
        raise InvalidRequest("workers", f"must be between 1 and {MAX_PREWARMED}, is {workers}")
    request = replace(request, sampling=SamplingParams(max_tokens=1, ignore_eos=True), n=1)
    first = await _finish(await begin(request, set(), ""))
    runs: list[Run] = []
    taken = {first.worker_id}
    try:
        while len(taken) < workers:
            run = await begin(request, taken, first.worker_id)
            runs.append(run)
            try:
                started = await anext(run)
            except Unavailable:  # there are no more
                break
            assert isinstance(started, Started), "a generation begins with Started"
            taken.add(started.worker_id)
        rest = await asyncio.gather(*(_finish(run) for run in runs[: len(taken) - 1]))
    finally:
        for run in runs:
            await run.aclose()
    return list({usage.worker_id: usage for usage in (first, *rest)}.values())


async def _finish(run: Run) -> Usage:
    async with aclosing(run):
        async for event in run:
            if isinstance(event, Finished) and event.usage is not None:
                return event.usage
    raise Unavailable("the prompt was not computed to its end, retry")
