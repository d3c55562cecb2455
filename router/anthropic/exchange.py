"""One message as one HTTP response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvhive.proto.errors import InvalidRequest, KvhiveError, Unavailable
from kvhive.router.anthropic.blocks import BlockCutter, Piece
from kvhive.router.anthropic.errors import REQUEST_ID_HEADER, describe_error, error_response
from kvhive.router.anthropic.events import PING, MessageEvents, named
from kvhive.router.anthropic.request import MessagesRequest
from kvhive.router.anthropic.response import MessageShape
from kvhive.router.frontend import Delta, Finished, GenerationEvent, Started, TokenizingFrontend
from kvhive.router.http_exchange import HttpExchange, WatchedSend, write
from kvhive.router.http_headers import IGNORED_HEADER
from kvhive.router.http_heartbeat import beating
from kvhive.router.request import validate_request


class MessageExchange(HttpExchange):
    """One request for a message being answered. See HttpExchange."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        asked: MessagesRequest,
        model: str,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `model` is the name that the answer bears."""
        super().__init__(gave_up)
        self._frontend = frontend
        self._asked = asked
        self._model = model
        self._request_id = asked.request.request_id

    def refusal(self, error: KvhiveError) -> Response:
        """See HttpExchange."""
        return error_response(spelled(error, self._asked), self._request_id)

    def last_event(self, error: KvhiveError) -> bytes:
        """See HttpExchange."""
        return named("error", describe_error(error, self._request_id))

    async def answer(self, scope: Scope, receive: Receive, send: WatchedSend) -> None:
        """See HttpExchange."""
        response: Response | None
        try:
            if self._asked.prewarm:
                response = await self._prewarm()
            else:
                async with aclosing(self._frontend.generate(self._asked.request)) as events:
                    response = await self._generate(events, send)
        except KvhiveError as error:
            response = self.refusal(error)
        if response is not None:
            await response(scope, receive, send)

    async def _prewarm(self) -> Response:
        model = self._frontend.models()[0]
        validate_request(self._asked.request, model.vocab_size, model.max_context)  # what does nothing, too
        usages = await self._frontend.prewarm(self._asked.request, 1)
        shape = MessageShape(self._request_id, self._model)
        return JSONResponse(shape.prewarmed(usages[0]), headers=self._head(usages[0].worker_id))

    async def _generate(
        self, events: AsyncGenerator[GenerationEvent, None], send: WatchedSend
    ) -> Response | None:
        """Return a whole answer; or stream one, and return None. Raises what comes before it has begun."""
        started = await anext(events)
        assert isinstance(started, Started), "a generation begins with Started"
        self._request_id = started.request_id
        shape = MessageShape(started.request_id, self._model)
        headers = self._head(started.worker_id)
        if not self._asked.stream:
            return JSONResponse(await _collected(shape, events), headers=headers)
        await self.open_stream(send, headers)
        made = MessageEvents(shape)
        await write(send, made.begun(started.prompt_tokens))
        try:
            async with beating(send, PING):
                await _stream(made, events, send)
        except KvhiveError as error:
            await write(send, self.last_event(error), more=False)
        return None

    def _head(self, worker_id: str) -> dict[str, str]:
        return head(self._asked) | {"x-kvhive-worker": worker_id}


def head(asked: MessagesRequest) -> dict[str, str]:
    """Return the headers that every answer has: whose it is, and what of the body changed nothing."""
    return {
        REQUEST_ID_HEADER: asked.request.request_id,
        **({IGNORED_HEADER: ",".join(asked.ignored)} if asked.ignored else {}),
    }


def spelled(error: KvhiveError, asked: MessagesRequest) -> KvhiveError:
    """Return an error in the words of the body."""
    if not isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(asked.spell(error.field), error.problem)


async def _stream(made: MessageEvents, events: AsyncGenerator[GenerationEvent, None], send: Send) -> None:
    async for event in events:
        match event:
            case Delta():
                news = made.news(event)
                if news:
                    await write(send, news)
            case Finished(usage=usage) if usage is not None:
                await write(send, made.ended(event, usage), more=False)
                return
    raise Unavailable("the generation ended without a result")


async def _collected(shape: MessageShape, events: AsyncGenerator[GenerationEvent, None]) -> dict[str, object]:
    cutter, pieces = BlockCutter(), list[Piece]()
    async for event in events:
        match event:
            case Delta():
                pieces.extend(cutter.push(event))
            case Finished(usage=usage) if usage is not None:
                return shape.whole(pieces, event, usage)
    raise Unavailable("the generation ended without a result")
