"""One completion, of either kind, as one HTTP response: from its first event to its last byte.

One coroutine owns the generators, so every way out (end, error, disconnect, shutdown) closes them at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvhive.proto.errors import InvalidRequest, KvhiveError, Unavailable
from kvhive.router.frontend import Delta, Finished, GenerationEvent, Started, TokenizingFrontend
from kvhive.router.joined_answers import joined, listed
from kvhive.router.openai.echo import echoed
from kvhive.router.openai.events import DONE_EVENT, NewsEvents, sse_event
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.logprobs import logprob_entries
from kvhive.router.openai.response import AnswerShape, WholeChoice, describe_error, error_response

SEND_TIMEOUT_S = 60.0
"""A client that takes nothing for this long, and at most a quarter more, is gone: its stream must not hold a
worker for ever."""
FAREWELL_S = 1.0
"""Longest the last words of a cancelled response may take."""


class _WatchedSend:
    """A `send` that says when the client has been taking nothing for too long: no timer for each token."""

    def __init__(self, send: Send, give_up: Callable[[], object]) -> None:
        self._send = send
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(SEND_TIMEOUT_S / 4, self._look)

    async def __call__(self, message: Any) -> None:
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    @property
    def stalled(self) -> bool:
        """Whether what is being sent now has taken SEND_TIMEOUT_S."""
        return self._since is not None and self._loop.time() - self._since >= SEND_TIMEOUT_S

    def _look(self) -> None:
        if self.stalled:
            self._give_up()
        else:
            self._timer = self._loop.call_later(SEND_TIMEOUT_S / 4, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()


class CompletionExchange(Response):
    """The ASGI application that answers one completion request."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        asked: CompletionRequest,
        shaped: Callable[[str], AnswerShape],
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `shaped` makes the answer's shape of the request's id, `gave_up` is called when its reader
        takes nothing for too long."""
        self._gave_up = gave_up
        self._frontend = frontend
        self._asked = asked
        self._shaped = shaped
        self._streaming = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate until the end or until the client is gone, whichever comes first."""
        answering = asyncio.current_task()
        assert answering is not None
        watched = _WatchedSend(send, answering.cancel)
        gone = asyncio.create_task(_disconnected(receive))

        def stop(_: asyncio.Task[None]) -> None:
            answering.cancel()

        gone.add_done_callback(stop)
        try:
            await self._answer(scope, receive, watched)
        except asyncio.CancelledError:
            if not (gone.done() or watched.stalled):
                # The server does so, after the grace of its shutdown; it expects no more of this task.
                await self._farewell(scope, receive, send)
            elif watched.stalled:
                self._gave_up()
        finally:
            watched.close()
            gone.remove_done_callback(stop)
            gone.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._asked.request.request_id
        async with AsyncExitStack() as stack:
            try:
                started, events = await self._begin(stack)
            except KvhiveError as error:
                await error_response(error, request_id)(scope, receive, send)
                return
            request_id = started[0].request_id
            shape = self._shaped(request_id)
            workers = listed(first.worker_id for first in started)
            headers = {"x-request-id": request_id, "x-kvhive-worker": workers}
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
            run = echoed(self._frontend, request) if self._asked.echo else self._frontend.generate(request)
            streams.append(await stack.enter_async_context(aclosing(run)))
            try:
                first = await anext(run)
            except InvalidRequest as error:
                problem = str(error).removeprefix(f"{error.field}: ")
                raise InvalidRequest(self._asked.spell(index, error.field), problem) from error
            assert isinstance(first, Started), "a generation begins with Started"
            started.append(first)
        if len(streams) == 1:  # nothing to number, and no layer between a token and its reader
            return started, streams[0]
        events = joined(streams, self._asked.request.n)
        return started, await stack.enter_async_context(aclosing(events))

    @property
    def _choices(self) -> range:
        return range(len(self._asked.requests) * self._asked.request.n)

    async def _stream(
        self,
        send: Send,
        shape: AnswerShape,
        headers: Mapping[str, str],
        events: AsyncGenerator[GenerationEvent, None],
    ) -> None:
        fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        # With include_usage, every other chunk says that its usage is null.
        extra: dict[str, Any] = {"usage": None} if self._asked.include_usage else {}
        openings = [piece for index in self._choices if (piece := shape.opening(index)) is not None]
        await _write(send, b"".join(sse_event(piece | extra) for piece in openings))  # if none: the head
        news = NewsEvents(shape, extra)
        try:
            async for event in events:
                match event:
                    case Delta(text, ids, index) if text or event.logprobs or (ids and shape.every_token):
                        entries = logprob_entries(event, self._frontend.token_piece)
                        await _write(send, news.event(index, text, entries))
                    case Finished(reason, usage, index):
                        last = sse_event(shape.end(index, reason) | extra)
                        if usage is None:
                            await _write(send, last)
                            continue
                        if self._asked.include_usage:
                            last += sse_event(shape.usage_chunk(usage))
                        await _write(send, last + DONE_EVENT, more=False)
                        return
        except KvhiveError as error:
            await _write(send, sse_event(describe_error(error)[1]))
        await _write(send, b"", more=False)

    async def _collect(
        self, shape: AnswerShape, events: AsyncGenerator[GenerationEvent, None]
    ) -> dict[str, Any]:
        wanted = self._asked.request.sampling.logprobs is not None
        choices = [WholeChoice(logprobs=[] if wanted else None) for _ in self._choices]
        async for event in events:
            match event:
                case Delta(text, _, index):
                    choices[index].pieces.append(text)
                    entries = choices[index].logprobs
                    if entries is not None:
                        entries.extend(logprob_entries(event, self._frontend.token_piece))
                case Finished(reason, usage, index):
                    choices[index].reason = reason
                    if usage is not None:
                        return shape.completion(choices, usage)
        raise Unavailable("the generation ended without a result")

    async def _farewell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client that the server is stopping, as well as its response still allows."""
        error = Unavailable("the server is shutting down")
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self._streaming:
                    await _write(send, sse_event(describe_error(error)[1]), more=False)
                else:
                    await error_response(error)(scope, receive, send)
        except (TimeoutError, RuntimeError):
            return  # the client takes nothing any more, or its response was already complete


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _write(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
