"""A generation whose choices begin with their prompt, as `echo: true` of POST /v1/completions asks.

A Frontend's stream goes in and one of the same kind comes out: the prompt looks like the first output, and
its log-probabilities like those of output tokens. What shapes the answer knows nothing of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvhive.router.frontend import (
    Delta,
    GenerationEvent,
    TokenizingFrontend,
    TokenLogprobs,
)
from kvhive.router.request import GenerateRequest, TextPrompt, TokenPrompt

SLICE_TOKENS = 256
"""Tokens of a prompt that are shaped before others have their turn on the event loop."""
NOTHING_BEFORE = TokenLogprobs(math.nan)
"""A prompt's first token follows nothing, so it has no probability."""


async def echoed(
    frontend: TokenizingFrontend, request: GenerateRequest
) -> AsyncGenerator[GenerationEvent, None]:
    """Run a request of text or token ids and yield what `generate` does, the prompt before the output.

    Where the request has prompt_logprobs, they come as `logprobs` of the prompt's tokens. Raises what
    `generate` and `tokenize` raise.
    """
    prompt = request.prompt
    assert isinstance(prompt, TextPrompt | TokenPrompt), "a conversation has no text of its own"
    scored = request.sampling.prompt_logprobs is not None
    if scored and isinstance(prompt, TextPrompt):
        ids = tuple(await frontend.tokenize(prompt, request.model))
        request = replace(request, prompt=TokenPrompt(ids))
    else:
        ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
    needed = len(ids) if scored else 0
    positions, shown = [NOTHING_BEFORE], False
    async with aclosing(frontend.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta) and event.prompt_logprobs:
                positions.extend(event.prompt_logprobs)
            else:
                yield event
            if shown or len(positions) < needed:
                continue
            shown = True
            text = prompt.text if isinstance(prompt, TextPrompt) else _text(frontend, ids)
            for choice in range(request.n):
                for part in _slices(text, ids, positions if scored else (), choice):
                    yield part
                    await asyncio.sleep(0)


def _text(frontend: TokenizingFrontend, ids: Sequence[int]) -> str:
    return b"".join(frontend.token_piece(token_id).data for token_id in ids).decode(errors="replace")


def _slices(
    text: str, ids: Sequence[int], positions: Sequence[TokenLogprobs], choice: int
) -> Iterator[Delta]:
    """Yield the prompt as output of one choice: all its text first, its scored tokens in slices."""
    yield Delta(text, tuple(ids[:SLICE_TOKENS]), choice, tuple(positions[:SLICE_TOKENS]))
    for start in range(SLICE_TOKENS, len(positions), SLICE_TOKENS):
        end = start + SLICE_TOKENS
        yield Delta("", tuple(ids[start:end]), choice, tuple(positions[start:end]))
