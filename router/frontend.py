"""What both doors, gRPC and HTTP, ask of the router behind them: the contract, and nothing else.

`generate` yields one Started, any number of Delta, and one Finished for each of the request's n choices,
whose deltas come interleaved; the last Finished carries the usage of them all. An error before the first
event is a plain refusal (InvalidRequest, Overloaded, Unavailable); a later one ends the stream. Closing the
generator (`aclose`) cancels the work at once and frees what it held; closing it twice is harmless.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvhive.router.request import GenerateRequest, Prompt

FinishReason = Literal["stop", "length", "tool_calls"]
"""`stop`: an end token, a stop token or a stop string; `length`: max_tokens were generated; `tool_calls`: as
`stop`, and the choice calls tools."""


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What became of one breakpoint."""

    tokens: int
    """Of the prompt up to it, in full blocks."""
    ttl_s: float
    kept: bool
    """Whether the worker keeps them."""
    not_kept: str = ""
    """Why it does not, in one word: below_minimum, over_budget, over_tenant_budget, making_room."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in tokens, and what the cache gave it."""

    prompt_tokens: int
    completion_tokens: int
    """Of all choices together."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the worker's pool."""
    reachable_tokens: int = 0
    """The most prompt tokens that any worker held when the request was routed."""
    written_tokens: int = 0
    """Prompt tokens whose full blocks this request added to the worker's pool."""
    worker_id: str = ""
    route_reason: str = ""
    failovers: int = 0
    drafted_tokens: int = 0
    """Drafts that were verified."""
    accepted_tokens: int = 0
    pulled_tokens: int = 0
    """Prompt tokens whose KV came from another worker for this request: neither cached nor computed."""
    kept: tuple[KeptPrefix, ...] = ()
    """One for each breakpoint, in the order of the prompt."""
    not_kept: str = ""
    """Why the first of those that are not kept is not."""

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that came from a cache, the worker's own or another's, and were not computed."""
        return self.cached_tokens + self.pulled_tokens


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted and a worker was chosen."""

    request_id: str
    worker_id: str
    prompt_tokens: int
    predicted_ttft_s: float = 0.0
    """When the first token was expected then, in seconds from now."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the model itself at one position, before any sampling option."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, best first: exactly as many as were asked for."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call; the first piece of a call has its id and name."""

    index: int
    """Which of the choice's calls."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """More of the JSON text."""


@dataclass(slots=True)  # made for every token: frozen ones cost thrice
class Delta:
    """New output. Text lags behind token ids while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...] = ()
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, where asked."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per prompt token but the first, where asked; all of them before the first output token."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """What of the output is no text, but a call of a tool."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice that went well."""

    reason: FinishReason
    usage: Usage | None
    """Of the whole request, on the last choice's end; None on the others'."""
    choice: int = 0
    stop: str = ""
    """The stop string that ended it, if one did."""


GenerationEvent = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be named in a request."""

    name: str
    max_context: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids are below this."""
    identity: str = ""
    """Digest of the weights and the configuration, in hex."""
    created: int = 0
    """Unix time in seconds when serving began."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """What one token is on its own."""

    text: str
    """For people: never empty, and never the same for two tokens of different bytes."""
    data: bytes
    """What it adds to decoded text, which may be part of a character; empty for a special token."""


class Frontend(Protocol):
    """The router as the doors see it. All methods are called on the event loop and never block it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run one request; an async generator function. Raises InvalidRequest, Overloaded, Unavailable."""
        ...

    def models(self) -> list[ModelInfo]:
        """Return the models that are served, the default first."""
        ...

    def token_piece(self, token_id: int) -> TokenPiece:
        """Return a token's text and bytes, whatever stands beside it."""
        ...

    def ready(self) -> bool:
        """Tell whether a request sent now would find a worker."""
        ...


class TokenizingFrontend(Frontend, Protocol):
    """A Frontend that also tells how it would tokenise, and prepares for a prompt."""

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        """Return the token ids that `generate` would compute. Raises InvalidRequest, Overloaded."""
        ...

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """Return the text of token ids, special tokens included. Raises InvalidRequest, Overloaded."""
        ...

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        """Bring a prompt's full blocks into the caches of `workers` workers, or of all there are.

        Answers when they are there, with what each took. Raises InvalidRequest, Overloaded, Unavailable.
        """
        ...
