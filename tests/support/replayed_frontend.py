"""A Frontend that answers every request with the same events."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from scripted_frontend import ScriptedFrontend

from kvhive.router.frontend import GenerationEvent, Started
from kvhive.router.request import GenerateRequest, validate_request


class ReplayedFrontend(ScriptedFrontend):
    """Plays `events` after Started."""

    def __init__(self, *events: GenerationEvent) -> None:
        super().__init__()
        self.events = events

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        validate_request(request, 1000, 8192)
        self.requests.append(request)
        yield Started(request.request_id or "made-up", "w1", 5)
        for event in self.events:
            yield event
