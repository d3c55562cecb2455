"""A Frontend without a cluster behind it: answers by what the prompt asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from kvhive.proto.errors import ComputeError, InvalidRequest, Overloaded, TimedOut, Unavailable
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.frontend import (
    Delta,
    Finished,
    GenerationEvent,
    KeptPrefix,
    ModelInfo,
    Started,
    TokenPiece,
    Usage,
)
from kvhive.router.request import GenerateRequest, Prompt, TextPrompt, validate_request

REFUSALS = {
    "busy": Overloaded("full"),
    "soon": Overloaded("full", cause="queues_full", retry_after_s=0.125),
    "later": Overloaded("full", cause="predicted_ttft", retry_after_s=7.25),
    "down": Unavailable("none"),
    "late": TimedOut("no first token within 1 s"),
    "broken": ComputeError("non-finite logits"),
    "bad": InvalidRequest("prompt", "is too long"),
}
USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    cached_tokens=4,
    reachable_tokens=3,
    written_tokens=1,
    worker_id="w2",
    route_reason="prefix",
    failovers=6,
)


def text_of(prompt: Prompt) -> str:
    """The text, the last message, or the token ids as words."""
    match prompt:
        case ChatPrompt(messages):
            return messages[-1].content
        case TextPrompt(text):
            return text
        case _:
            return f"say {len(prompt.token_ids)}"


class ScriptedFrontend:
    """Answers with the prompt's words one by one, or does what its first word asks for."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.active = 0
        self.is_ready = True
        self.predicted_ttft_s = 0.0
        self.timeouts: list[str] = []
        """For a door to tell what it gave up."""

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("demo", 8192, 1000, "ab12", 77)]

    def token_piece(self, token_id: int) -> TokenPiece:
        return TokenPiece(f"t{token_id}", b"t%d" % token_id)

    def ready(self) -> bool:
        return self.is_ready

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        verb, *words = text_of(prompt).split()
        if verb == "refuse":
            raise REFUSALS[words[0]]
        return [len(word) for word in words]

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        return " ".join(map(str, token_ids))

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        verb, *words = text_of(request.prompt).split()
        if verb == "refuse":
            raise REFUSALS[words[0]]
        kept = tuple(
            KeptPrefix(4, pin.ttl_s, pin.ttl_s < 100, "" if pin.ttl_s < 100 else "over_budget")
            for pin in request.pins
        )
        why = "" if all(prefix.kept for prefix in kept) else "over_budget"
        return [
            Usage(7, 1, 1, 0, 2, f"w{i}", pulled_tokens=3, kept=kept, not_kept=why) for i in range(workers)
        ]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.active += 1
        try:
            validate_request(request, 1000, 8192)
            self.requests.append(request)
            verb, *words = text_of(request.prompt).split()
            if verb == "refuse":
                raise REFUSALS[words[0]]
            if verb == "bug":
                raise ZeroDivisionError
            yield Started(request.request_id or "made-up", "w1", 5, self.predicted_ttft_s)
            for word in words:
                yield Delta(word, (1,))
                yield Delta("", (2,))
            if verb == "break":
                raise Unavailable("the worker was lost")
            if verb == "hang":
                await asyncio.Event().wait()
            while verb == "flood":
                yield Delta("x" * 10_000, (1,))
            yield Finished("stop", USAGE)
        finally:
            self.active -= 1

    async def until_idle(self, within_s: float = 5.0) -> None:
        """Wait until no generation is running: one that hangs ends only by being cancelled."""
        deadline = time.monotonic() + within_s
        while self.active:
            assert time.monotonic() < deadline, "a generation was not cancelled"
            await asyncio.sleep(0.005)

    async def until_active(self, count: int = 1) -> None:
        while self.active < count:  # noqa: ASYNC110 - polled, so that the script stays a plain generator
            await asyncio.sleep(0.005)
