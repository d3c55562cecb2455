"""Many requests on one stream: each as it would be on its own, and the news of a step in one message."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from session_rig import Talk, session
from worker_rig import WorkerRig, running_worker

from kvhive.proto.index_schema import WorkerState
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.session import Session


class Conversation:
    """A router's end, message by message."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.call = talk, talk.call
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, worker_pb2.SessionEnd] = {}
        self.messages: list[worker_pb2.SessionResponse] = []

    async def say(self, **fields: Any) -> None:
        self.talk.say(**fields)

    async def hear(self) -> None:
        message = await self.talk.read()
        assert message is not None
        self.messages.append(message)
        for news in message.news:
            for update in news.response.updates:
                self.tokens[news.request_id].extend(update.token_ids)
            if news.HasField("end"):
                assert news.request_id not in self.ends
                self.ends[news.request_id] = news.end

    async def until_ended(self, *request_ids: str) -> None:
        while not set(request_ids) <= set(self.ends):
            await self.hear()


@asynccontextmanager
async def conversation(**options: Any) -> AsyncIterator[tuple[WorkerRig, Conversation]]:
    async with running_worker(**options) as rig, session(rig) as talk:
        yield rig, Conversation(talk)
        await rig.idle()


async def test_every_request_gets_its_own_tokens_and_steps_travel_together() -> None:
    async with conversation(step_s=0.02) as (rig, talk):
        prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(1, 5)}
        await talk.say(start=[rig.request(name, tokens, 16) for name, tokens in prompts.items()])
        await talk.until_ended(*prompts)
        for name, tokens in prompts.items():
            assert talk.tokens[name] == rig.oracle(tokens, 16)
            assert talk.ends[name].status == "OK"
        assert len(talk.messages) < 30  # 64 tokens: alone, each would have been a message
        assert any(len(message.news) == 4 for message in talk.messages)


async def test_an_error_ends_its_request_only() -> None:
    async with conversation(step_s=0.005) as (rig, talk):
        wrong = rig.request("wrong", [1], 0)
        stranger = rig.request("stranger", [1])
        stranger.worker_id = "another"
        await talk.say(start=[rig.request("good", [5, 6], 8), wrong, stranger])
        await talk.until_ended("good", "wrong", "stranger")
        assert talk.tokens["good"] == rig.oracle([5, 6], 8)
        assert talk.ends["wrong"].status == "INVALID_ARGUMENT" and "max_tokens" in talk.ends["wrong"].details
        assert talk.ends["stranger"].status == "FAILED_PRECONDITION"
        rig.service.state = WorkerState.DRAINING
        await talk.say(start=[rig.request("late", [5, 6], 8)])
        await talk.until_ended("late")
        assert talk.ends["late"].status == "UNAVAILABLE" and "draining" in talk.ends["late"].details


async def test_a_cancelled_request_frees_its_blocks_and_nothing_more_is_said_of_it() -> None:
    async with conversation(step_s=0.005) as (rig, talk):
        await talk.say(start=[rig.request("gone", [1, 2], 500)])
        await talk.hear()
        await talk.say(cancel=["gone", "never was"])
        await rig.idle()
        assert not talk.ends
        await talk.say(start=[rig.request("next", [3], 2)])
        await talk.until_ended("next")


async def test_a_held_request_says_nothing_and_loses_nothing() -> None:
    async with conversation(step_s=0.002) as (rig, talk):
        await talk.say(start=[rig.request("slow", [1, 2], 40), rig.request("fast", [3, 4], 80)])
        await talk.hear()
        await talk.say(hold=["slow"])
        await talk.until_ended("fast")
        assert len(talk.tokens["slow"]) < 40 and "slow" not in talk.ends
        heard = len(talk.messages)
        await talk.say(resume=["slow"])
        await talk.until_ended("slow")
        assert len(talk.messages) == heard + 1  # gathered meanwhile
        assert talk.tokens["slow"] == rig.oracle([1, 2], 40)


async def test_no_first_token_in_time() -> None:
    async with conversation(step_s=0.3) as (rig, talk):
        await talk.say(start=[rig.request("late", [1, 2], 4, queue_timeout_s=0.05)])
        await talk.until_ended("late")
        assert talk.ends["late"].status == "DEADLINE_EXCEEDED"
        assert "queue_timeout_s: no first token within 0.05 s" in talk.ends["late"].details


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_the_end_of_the_stream_ends_its_requests(how: str) -> None:
    async with conversation(step_s=0.005) as (rig, talk):
        await talk.say(start=[rig.request(f"r{i}", [i], 1000) for i in range(1, 4)])
        await talk.hear()
        if how == "cancelled":
            talk.call.cancel()
        else:
            talk.talk.connection.close()
        await rig.idle()


async def test_a_worker_that_stops_lets_its_routers_go() -> None:
    async with conversation() as (rig, talk):
        await talk.say(start=[rig.request("r", [1], 2)])
        await talk.until_ended("r")
        rig.service.door.close()
        assert await talk.talk.read() is None
        assert await asyncio.wait_for(talk.call.read(), 10) is grpc.aio.EOF


async def test_strangers_are_refused() -> None:
    async with running_worker() as rig:
        call = rig.stub.Session(worker_pb2.OpenSessionRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\xff" * 40, b"\0\0\0\x20" + b"x" * 32, b"\0\0\0\x01x"])
async def test_who_has_no_ticket_is_hung_up_on(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, half a length, a huge one, a wrong ticket, a short one: soon gone, and a session goes on."""
    monkeypatch.setattr("kvhive.worker.session_door.TICKET_S", 0.5)
    async with conversation(step_s=0.002) as (rig, talk):
        port = rig.service.door.offer(Session(rig.service)).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await talk.say(start=[rig.request("r", [1], 2)])
        await talk.until_ended("r")


async def test_of_too_many_without_a_ticket_the_oldest_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhive.worker.session_door.TICKET_S", 600.0)
    async with conversation() as (rig, talk):
        port = rig.service.door.offer(Session(rig.service)).port
        silent = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(70)))
        ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
        async with asyncio.timeout(10):
            while sum(end.done() for end in ends) < 6:
                await asyncio.wait([end for end in ends if not end.done()], return_when="FIRST_COMPLETED")
        assert len(rig.service.door._strangers) == 64
        assert sum(end.done() for end in ends) == 6
        await talk.say(start=[rig.request("r", [1], 2)])
        await talk.until_ended("r")
        for end, (_, writer) in zip(ends, silent, strict=True):
            end.cancel()
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_ticket_is_good_for_one_connection() -> None:
    async with conversation() as (rig, _):
        offer = rig.service.door.offer(Session(rig.service))
        assert rig.service.door._redeem(offer.ticket) is not None
        assert rig.service.door._redeem(offer.ticket) is None
