"""One generation as one HTTP response, from its first event to its last byte.

One coroutine owns the generator, so every way out (end, error, disconnect, shutdown) closes it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvhive.proto.errors import KvhiveError, Unavailable
from kvhive.router.frontend import Delta, Finished, Frontend, GenerationEvent, Started
from kvhive.router.openai_logprobs import logprob_entries
from kvhive.router.openai_request import ChatCompletionRequest
from kvhive.router.openai_response import (
    DONE_EVENT,
    CompletionShape,
    WholeChoice,
    describe_error,
    error_response,
    sse_event,
)

SEND_TIMEOUT_S = 60.0
"""A client that takes nothing for this long is gone: its stream must not hold a worker for ever."""
FAREWELL_S = 1.0
"""Longest the last words of a cancelled response may take."""


class _ClientStalled(Exception):
    """The client took no bytes for SEND_TIMEOUT_S."""


class CompletionExchange(Response):
    """The ASGI application that answers one chat completion request."""

    def __init__(self, frontend: Frontend, chat: ChatCompletionRequest, model: str, created: int) -> None:
        self._frontend = frontend
        self._chat = chat
        self._model = model
        self._created = created
        self._streaming = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate until the end or until the client is gone, whichever comes first."""
        bounded = _bounded(send)
        answer = asyncio.create_task(self._answer(scope, receive, bounded))
        watcher = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Only the server cancels this task, after the grace of its shutdown; it expects no more of it.
            await _end(answer)
            await self._farewell(scope, receive, bounded)
            return
        finally:
            await _end(watcher)
            await _end(answer)
        if not answer.cancelled() and not isinstance(answer.exception(), _ClientStalled):
            answer.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._chat.request.request_id
        async with aclosing(self._frontend.generate(self._chat.request)) as events:
            try:
                started = await anext(events)
            except KvhiveError as error:
                await error_response(error, request_id)(scope, receive, send)
                return
            assert isinstance(started, Started), "a generation begins with Started"
            shape = CompletionShape(started.request_id, self._model, self._created)
            headers = {"x-request-id": started.request_id, "x-kvhive-worker": started.worker_id}
            if self._chat.stream:
                await self._stream(send, shape, headers, events)
                return
            try:
                body = await self._collect(shape, events)
            except KvhiveError as error:
                await error_response(error, started.request_id)(scope, receive, send)
                return
            await JSONResponse(body, headers=headers)(scope, receive, send)

    async def _stream(
        self,
        send: Send,
        shape: CompletionShape,
        headers: Mapping[str, str],
        events: AsyncGenerator[GenerationEvent, None],
    ) -> None:
        fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        # With include_usage, every other chunk says that its usage is null.
        extra: dict[str, Any] = {"usage": None} if self._chat.include_usage else {}
        roles = [
            sse_event(shape.chunk(index, {"role": "assistant", "content": ""}) | extra)
            for index in range(self._chat.request.n)
        ]
        await _write(send, b"".join(roles))
        try:
            async for event in events:
                match event:
                    case Delta(text, _, index) if text or event.logprobs:
                        entries = logprob_entries(event, self._frontend.token_piece)
                        chunk = shape.chunk(index, {"content": text}, logprobs=entries)
                        await _write(send, sse_event(chunk | extra))
                    case Finished(reason, usage, index):
                        last = sse_event(shape.chunk(index, {}, reason) | extra)
                        if usage is not None:
                            if self._chat.include_usage:
                                last += sse_event(shape.usage_chunk(usage))
                            last += DONE_EVENT
                        await _write(send, last)
        except KvhiveError as error:
            await _write(send, sse_event(describe_error(error)[1]))
        await _write(send, b"", more=False)

    async def _collect(
        self, shape: CompletionShape, events: AsyncGenerator[GenerationEvent, None]
    ) -> dict[str, Any]:
        wanted = self._chat.request.sampling.logprobs is not None
        choices = [WholeChoice(logprobs=[] if wanted else None) for _ in range(self._chat.request.n)]
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
        except (TimeoutError, _ClientStalled, RuntimeError):
            return  # the client takes nothing any more, or its response was already complete


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended; its result is the caller's business."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def _bounded(send: Send) -> Send:
    async def send_in_time(message: Any) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)
        except TimeoutError as error:
            raise _ClientStalled from error

    return send_in_time


async def _write(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
