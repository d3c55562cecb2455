"""One request's way out of a worker: the outputs of all its choices, gathered into messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from kvhive.proto.v1 import worker_pb2
from kvhive.worker.engine import Output
from kvhive.worker.model_runner import TokenLogprobs
from kvhive.worker.request_validation import choice_of
from kvhive.worker.sequence import FinishReason

MAX_POSITIONS_PER_MESSAGE = 2048
"""Tokens, of prompt and output, after which a message goes out although more is ready: with the most
alternatives that is below half a megabyte."""


class RequestStream:
    """What a request's sequences put in, its gRPC stream takes out. Lives on one event loop.

    Holds at most max_tokens outputs of each choice, however slow the reader is.
    """

    def __init__(self, choices: Iterable[int], heard: Callable[[], None] | None = None) -> None:
        """Begin; `heard` is called when there is news, where nobody waits in `take`."""
        self._open = set(choices)
        self._outputs: deque[Output | None] = deque()  # bounded by the choices' max_tokens
        self._news = asyncio.Event()
        self._heard = heard or self._news.set
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the first output token was taken out."""
        return self._begun

    @property
    def ended(self) -> bool:
        """Whether all choices have ended, or were stopped, and nothing more is to come."""
        return not self._open

    @property
    def unfinished(self) -> frozenset[int]:
        """The choices of which more is to come, as far as was taken out."""
        return frozenset(self._open)

    @property
    def ready(self) -> bool:
        """Whether there is news."""
        return bool(self._outputs)

    def put(self, output: Output | None) -> None:
        """Add the news of one sequence."""
        self._outputs.append(output)
        self._heard()

    def stop(self, choice: int) -> bool:
        """End a choice; what is ready of it is dropped. False where it is unknown or has ended."""
        if choice not in self._open:
            return False
        self._open.remove(choice)
        self.put(None)  # the reader may be waiting for this choice only
        return True

    async def take(self) -> worker_pb2.WorkerGenerateResponse:
        """Wait for news and return all that is ready; see `take_into`."""
        await self._news.wait()
        response = worker_pb2.WorkerGenerateResponse()
        self.take_into(response, MAX_POSITIONS_PER_MESSAGE)
        if not self._outputs:
            self._news.clear()
        return response

    def take_into(self, response: worker_pb2.WorkerGenerateResponse, room: int) -> int:
        """Move what is ready into an empty message, up to about `room` positions; return how many.

        It stays empty when a choice was stopped meanwhile. Raises the KvhiveError that one of the choices
        ended with.
        """
        updates: dict[int, worker_pb2.ChoiceUpdate] = {}
        taken = 0
        while taken < room and self._outputs:
            taken += self._add(self._outputs.popleft(), response, updates)
        return taken

    def _add(
        self,
        output: Output | None,
        response: worker_pb2.WorkerGenerateResponse,
        updates: dict[int, worker_pb2.ChoiceUpdate],
    ) -> int:
        """Add one output to a message that is being made; return the positions it took."""
        if output is None:
            return 0
        if output.error is not None:
            raise output.error
        _, choice = choice_of(output.request_id)
        if choice not in self._open:
            return 0
        if output.tokens and not self._begun:
            self._begun = True
            response.cached_tokens = output.cached_tokens
            response.written_tokens = output.written_tokens
            response.pinned_tokens = output.pinned_tokens
            response.pins_refused = output.pins_refused
            response.pulled_tokens = output.pulled_tokens
        if output.prompt_logprobs:
            response.prompt_logprobs.extend(map(_wire_logprobs, output.prompt_logprobs))
        if output.tokens or output.finish is not None:
            update = updates.get(choice)
            if update is None:
                update = updates[choice] = response.updates.add(choice=choice)
            update.token_ids.extend(output.tokens)
            if output.logprobs:
                update.logprobs.extend(map(_wire_logprobs, output.logprobs))
            if output.drafted:
                update.drafted_tokens, update.accepted_tokens = output.drafted, output.accepted
            if output.finish is not None:
                update.finished.stopped = output.finish is FinishReason.STOP
                self._open.discard(choice)
        return len(output.tokens) + len(output.prompt_logprobs)


def _wire_logprobs(position: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=position.logprob,
        top_ids=[token_id for token_id, _ in position.top],
        top_logprobs=[logprob for _, logprob in position.top],
    )
