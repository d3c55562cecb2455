"""A generation without an answer, as `prompt_cache_options: {"prewarm": true}` asks: the prompt gets cached.

It looks like any other of a Frontend's streams, so what shapes the answer knows nothing of it.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from kvhive.router.frontend import Finished, GenerationEvent, Started, TokenizingFrontend
from kvhive.router.request import GenerateRequest, validate_request


async def prewarmed(
    frontend: TokenizingFrontend, request: GenerateRequest
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield empty choices once a worker has the prompt's full blocks. Raises what `prewarm` raises."""
    model = frontend.models()[0]
    validate_request(request, model.vocab_size, model.max_context)  # options, too, though they do nothing
    [usage] = await frontend.prewarm(request, workers=1)
    request_id = request.request_id or f"req-{secrets.token_hex(12)}"
    yield Started(request_id, usage.worker_id, usage.prompt_tokens)
    for choice in range(request.n):
        last = choice == request.n - 1
        yield Finished("stop", replace(usage, completion_tokens=0) if last else None, choice)
