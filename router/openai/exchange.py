"""One completion, of either kind, as one HTTP response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvhive.proto.errors import InvalidRequest, KvhiveError, Unavailable
from kvhive.router.frontend import Delta, Finished, GenerationEvent, Started, TokenizingFrontend
from kvhive.router.http_exchange import HttpExchange, WatchedSend, write
from kvhive.router.http_heartbeat import beating
from kvhive.router.joined_answers import joined, listed
from kvhive.router.openai.echo import echoed
from kvhive.router.openai.events import BEAT, DONE_EVENT, NewsEvents, sse_event
from kvhive.router.openai.field_policy import ignored_header
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.logprobs import logprob_entries
from kvhive.router.openai.prewarming import prewarmed
from kvhive.router.openai.response import AnswerShape, WholeChoice, describe_error, error_response
from kvhive.router.request import GenerateRequest


class CompletionExchange(HttpExchange):
    """One completion request being answered. See HttpExchange."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        asked: CompletionRequest,
        shaped: Callable[[str], AnswerShape],
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `shaped` makes the answer's shape of the request's id, `gave_up` is called when its reader
        takes nothing for too long."""
        super().__init__(gave_up)
        self._frontend = frontend
        self._asked = asked
        self._shaped = shaped

    def refusal(self, error: KvhiveError) -> Response:
        """See HttpExchange."""
        return error_response(error, self._asked.request.request_id)

    def last_event(self, error: KvhiveError) -> bytes:
        """See HttpExchange."""
        return sse_event(describe_error(error)[1])

    async def answer(self, scope: Scope, receive: Receive, send: WatchedSend) -> None:
        """See HttpExchange."""
        async with AsyncExitStack() as stack:
            try:
                started, events = await self._begin(stack)
            except KvhiveError as error:
                await self.refusal(error)(scope, receive, send)
                return
            request_id = started[0].request_id
            shape = self._shaped(request_id)
            workers = listed(first.worker_id for first in started)
            headers = {"x-request-id": request_id, "x-kvhive-worker": workers}
            headers |= ignored_header(self._asked.ignored)
            if self._asked.stream:
                await self._stream(send, shape, headers, events)
                return
            try:
                body = await self._collect(shape, events)
            except KvhiveError as error:
                await error_response(error, request_id)(scope, receive, send)
                return
            await JSONResponse(body, headers=headers)(scope, receive, send)

    async def _begin(
        self, stack: AsyncExitStack
    ) -> tuple[list[Started], AsyncGenerator[GenerationEvent, None]]:
        """Begin every prompt's generation; return their starts, and all that follows as one stream.

        Raises the first refusal, in the words of the body. The generations are closed with `stack`.
        """
        started, streams = [], []
        for index, request in enumerate(self._asked.requests):
            run = self._run(request)
            streams.append(await stack.enter_async_context(aclosing(run)))
            try:
                first = await anext(run)
            except InvalidRequest as error:
                raise InvalidRequest(self._asked.spell(index, error.field), error.problem) from error
            assert isinstance(first, Started), "a generation begins with Started"
            started.append(first)
        if len(streams) == 1:  # nothing to number, and no layer between a token and its reader
            return started, streams[0]
        events = joined(streams, self._asked.request.n)
        return started, await stack.enter_async_context(aclosing(events))

    def _run(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        if self._asked.prewarm:
            return prewarmed(self._frontend, request)
        return echoed(self._frontend, request) if self._asked.echo else self._frontend.generate(request)

    @property
    def _choices(self) -> range:
        return range(len(self._asked.requests) * self._asked.request.n)

    async def _stream(
        self,
        send: WatchedSend,
        shape: AnswerShape,
        headers: Mapping[str, str],
        events: AsyncGenerator[GenerationEvent, None],
    ) -> None:
        await self.open_stream(send, headers)
        # With include_usage, every other chunk says that its usage is null.
        extra: dict[str, Any] = {"usage": None} if self._asked.include_usage else {}
        openings = [piece for index in self._choices if (piece := shape.opening(index)) is not None]
        await write(send, b"".join(sse_event(piece | extra) for piece in openings))  # if none: the head
        try:
            async with beating(send, BEAT):
                await self._news(send, shape, extra, events)
        except KvhiveError as error:
            await write(send, self.last_event(error), more=False)

    async def _news(
        self,
        send: Send,
        shape: AnswerShape,
        extra: dict[str, Any],
        events: AsyncGenerator[GenerationEvent, None],
    ) -> None:
        news = NewsEvents(shape, extra)
        async for event in events:
            match event:
                case Delta(text, ids, index):
                    entries = logprob_entries(event, self._frontend.token_piece) if event.logprobs else ()
                    if event.tool_calls:
                        calls = shape.calls(index, event.tool_calls, text, entries)
                        await write(send, sse_event(calls | extra))
                    elif text or entries or (ids and shape.every_token):
                        await write(send, news.event(index, text, entries))
                case Finished(reason, usage, index):
                    last = sse_event(shape.end(index, reason) | extra)
                    if usage is None:
                        await write(send, last)
                        continue
                    if self._asked.include_usage:
                        last += sse_event(shape.usage_chunk(usage))
                    await write(send, last + DONE_EVENT, more=False)
                    return
        await write(send, b"", more=False)

    async def _collect(
        self, shape: AnswerShape, events: AsyncGenerator[GenerationEvent, None]
    ) -> dict[str, Any]:
        wanted = self._asked.request.sampling.logprobs is not None
        choices = [WholeChoice(logprobs=[] if wanted else None) for _ in self._choices]
        async for event in events:
            match event:
                case Delta(text, _, index):
                    choices[index].pieces.append(text)
                    choices[index].add_calls(event.tool_calls)
                    entries = choices[index].logprobs
                    if entries is not None:
                        entries.extend(logprob_entries(event, self._frontend.token_piece))
                case Finished(reason, usage, index):
                    choices[index].reason = reason
                    if usage is not None:
                        return shape.completion(choices, usage)
        raise Unavailable("the generation ended without a result")
