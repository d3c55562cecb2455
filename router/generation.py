"""One request on its way: what is fixed, and what its workers have brought of each choice so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvhive.proto.v1 import worker_pb2
from kvhive.router.choice_output import ChoiceOutput
from kvhive.router.decision_ledger import LedgerEntry
from kvhive.router.frontend import Delta, Finished, FinishReason, TokenLogprobs, Usage
from kvhive.router.pins import AskedPin, kept_prefixes
from kvhive.router.placement import Placement, PullSource
from kvhive.router.prompt import PreparedPrompt
from kvhive.router.request import GenerateRequest


@dataclass(slots=True)
class Choice:
    """One of a request's n answers."""

    index: int
    output: ChoiceOutput
    ended: bool = False
    drafted: int = 0
    """Drafts that the present worker has verified; `earlier_drafted` is what those before it had."""
    accepted: int = 0
    earlier_drafted: int = 0
    earlier_accepted: int = 0

    def moved(self) -> None:
        """Its next news come from another worker, which counts from nothing."""
        self.earlier_drafted, self.drafted = self.earlier_drafted + self.drafted, 0
        self.earlier_accepted, self.accepted = self.earlier_accepted + self.accepted, 0


@dataclass(slots=True)
class Generation:
    """The state of one request, which outlives the workers that it loses."""

    request: GenerateRequest
    request_id: str
    """The caller's, for headers and logs; two requests may bear the same one."""
    wire_id: str
    """Ours, never used twice."""
    prompt: PreparedPrompt
    max_tokens: int
    """Most tokens of each choice: by the request, or as many as the model's context leaves room for."""
    seed: int
    choices: list[Choice]
    stop_token_ids: list[int]
    arrived: float
    """When it came, in seconds of the dispatcher's clock."""
    waiting_since: float
    """From when on it waits for a token: since it came or, in the middle of its answers, since it moved."""
    cached_tokens: int | None = None
    written_tokens: int = 0
    pulled_tokens: int = 0
    pins: tuple[AskedPin, ...] = ()
    """What of the prompt is to stay cached, in the order that it was asked for."""
    pinned_tokens: int = 0
    """Of the longest pin that the present worker keeps."""
    pins_refused: str = ""
    """Why it does not keep a longer one."""
    reachable_tokens: int = 0
    failovers: int = 0
    retired: int = 0
    """Of those, the workers that drained."""
    passes: int = 0
    """Times a worker's queue was full."""
    pull_from: PullSource | None = None
    """Where its blocks are to come from, whatever the index says; for a copy that was asked for."""
    decision: LedgerEntry | None = None
    """Why it is where it is."""
    avoid: set[str] = field(default_factory=set)
    """Workers that were lost or full."""
    may_wait: bool = True
    """Whether it may be held until a worker serves."""
    held: bool = False
    """Whether it has been."""
    prompt_positions: int = 0
    """Prompt log-probabilities that went out, and of them how many the present worker has repeated."""
    repeated_positions: int = 0
    _cut: list[int] = field(default_factory=list)
    _ended: int = 0
    """Choices that have."""
    _heard: bool = False
    """Whether the present worker has brought its first token."""

    @property
    def unfinished(self) -> list[Choice]:
        """The choices that have not ended."""
        return [choice for choice in self.choices if not choice.ended]

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return self._ended == len(self.choices)

    @property
    def untouched(self) -> bool:
        """Whether no choice has a token yet, so that all may start again as one."""
        return not any(choice.output.token_ids or choice.ended for choice in self.choices)

    def moved(self, now: float) -> None:
        """What comes next comes from another worker."""
        if not self.untouched:
            self.waiting_since = now
        self.repeated_positions = self.pinned_tokens = 0
        self._heard = False
        for choice in self.choices:
            choice.moved()

    def take(
        self, message: worker_pb2.WorkerGenerateResponse, placement: Placement
    ) -> Sequence[Delta | Finished]:
        """Take in what a worker sent and return what it means; the last choice's end carries the usage."""
        news: list[Delta | Finished] = []
        if not self._heard:
            self._hear(message, placement)
        if self.request.sampling.prompt_logprobs is not None and message.prompt_logprobs:
            news += self._prompt_logprobs(message.prompt_logprobs)
        for update in message.updates:
            if update.choice < len(self.choices) and not self.choices[update.choice].ended:
                self._update(self.choices[update.choice], update, placement, news)
        return news

    def _hear(self, message: worker_pb2.WorkerGenerateResponse, placement: Placement) -> None:
        """Take in what a worker says once, with its first token."""
        if not message.HasField("cached_tokens"):
            return
        self._heard = True
        if self.cached_tokens is None:
            self.cached_tokens, self.written_tokens = message.cached_tokens, message.written_tokens
            self.pulled_tokens = message.pulled_tokens
            self.reachable_tokens = placement.reachable_tokens
            if self.decision is not None:
                self.decision.cached_tokens = message.cached_tokens
        if message.HasField("pinned_tokens"):
            self.pinned_tokens, self.pins_refused = message.pinned_tokens, message.pins_refused

    def take_cut(self) -> list[int]:
        """Return the choices that have ended here since the last time: their worker would go on."""
        if not self._cut:
            return []
        cut, self._cut = self._cut, []
        return cut

    def _prompt_logprobs(self, positions: Sequence[worker_pb2.TokenLogprobs]) -> Iterator[Delta]:
        """Pass on what the client has not had; a worker that took over starts from the beginning."""
        old = min(len(positions), self.prompt_positions - self.repeated_positions)
        self.repeated_positions += len(positions)
        self.prompt_positions += len(positions) - old
        if len(positions) > old:
            yield Delta("", prompt_logprobs=tuple(map(_logprobs, positions[old:])))

    def _update(
        self,
        choice: Choice,
        update: worker_pb2.ChoiceUpdate,
        placement: Placement,
        news: list[Delta | Finished],
    ) -> None:
        """Add what one choice's tokens, or its end, mean."""
        output, index = choice.output, choice.index
        finished = update.HasField("finished")
        pieces, token_ids = output.push(tuple(update.token_ids))
        if update.drafted_tokens:
            choice.drafted, choice.accepted = update.drafted_tokens, update.accepted_tokens
        if pieces or token_ids:
            logprobs: tuple[TokenLogprobs, ...] = ()
            if self.request.sampling.logprobs is not None:
                logprobs = tuple(map(_logprobs, update.logprobs[: len(token_ids)]))
            text, calls = pieces.pop(0) if pieces else ("", ())
            news.append(Delta(text, token_ids, index, logprobs, tool_calls=calls))
        if output.stopped or finished:
            pieces += output.finish()
            choice.ended = True
        for text, calls in pieces:
            news.append(Delta(text, choice=index, tool_calls=calls))
        if choice.ended:
            self._ended += 1
            if not finished:
                self._cut.append(index)
            reason = _reason(output, update.finished.stopped or output.stopped)
            news.append(Finished(reason, self._usage(placement) if self.ended else None, index, output.stop))

    def _usage(self, placement: Placement) -> Usage:
        kept, not_kept = kept_prefixes(self.pins, self.pinned_tokens, self.pins_refused)
        return Usage(
            prompt_tokens=len(self.prompt.token_ids),
            completion_tokens=sum(len(choice.output.token_ids) for choice in self.choices),
            cached_tokens=self.cached_tokens or 0,
            reachable_tokens=self.reachable_tokens,
            written_tokens=self.written_tokens,
            worker_id=placement.worker_id,
            route_reason=placement.decision.reason.value,
            failovers=self.failovers,
            drafted_tokens=sum(choice.earlier_drafted + choice.drafted for choice in self.choices),
            accepted_tokens=sum(choice.earlier_accepted + choice.accepted for choice in self.choices),
            pulled_tokens=self.pulled_tokens,
            kept=kept,
            not_kept=not_kept,
        )


def _reason(output: ChoiceOutput, stopped: bool) -> FinishReason:
    if not stopped:
        return "length"
    return "tool_calls" if output.calls_tools else "stop"


def _logprobs(position: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(position.logprob, tuple(zip(position.top_ids, position.top_logprobs, strict=True)))
