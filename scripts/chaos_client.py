"""The outside client of a chaos run: one attempt at one request, over either door, word for word."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import grpc
import h11

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.scripts.bench_client import ExchangeFailed, stream_events, whole_json
from kvhive.scripts.chaos_work import Transcript, Work

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_RETRYABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_RETRYABLE_STATUSES = (429, 503)
_RETRYABLE_WORDS = ("overloaded", "unavailable")
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
ASK_TIMEOUT_S = 10.0


class Ending(StrEnum):
    """How an attempt ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """With an error that says: retry."""
    BROKEN = "broken"
    """Without a word: the connection ended."""
    EXPIRED = "expired"
    """At the deadline that it was sent with."""
    LEFT = "left"
    """By us, as agreed."""
    WRONG = "wrong"
    """With an error that no fault excuses."""


class OutsideClient:
    """Speaks to one router. Lives on one event loop."""

    def __init__(self, name: str, grpc_target: str, http: str) -> None:
        self.name = name
        self._http = http
        self._channel = grpc.aio.insecure_channel(grpc_target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def ask(self, work: Work, deadline_s: float, seen: Transcript) -> tuple[Ending, str]:
        """Make one attempt, by the door that is the work's. Returns how it ended, and what was said then."""
        try:
            async with asyncio.timeout(deadline_s + 1.0):  # over gRPC the deadline itself comes first
                if work.by_http:
                    return await self._by_http(work, seen)
                return await self._by_grpc(work, deadline_s, seen)
        except TimeoutError:
            return Ending.EXPIRED, f"nothing more within {deadline_s:.3g} s"

    async def ask_and_leave(self, work: Work, after_s: float, seen: Transcript) -> tuple[Ending, str]:
        """Make an attempt, and go away after some time."""
        try:
            async with asyncio.timeout(after_s):
                return await self.ask(work, 60.0, seen)
        except TimeoutError:
            return Ending.LEFT, ""

    async def prewarm(self, work: Work, deadline_s: float) -> tuple[Ending, str]:
        """Bring the work's prompt into two workers' caches."""
        asked = pb.PrewarmRequest(
            token_ids=pb.TokenIds(ids=work.prompt), cache_salt=work.salt, cache_key=work.key, workers=2
        )
        try:
            answer = await self._stub.Prewarm(asked, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            return _grpc_ending(error)
        if answer.prompt_tokens != len(work.prompt) or not answer.workers:
            return Ending.WRONG, f"prewarmed {answer}"
        return Ending.ANSWERED, ""

    async def cluster(self) -> pb.GetClusterResponse:
        """Return what the router knows, with an audit. Raises AioRpcError."""
        answer: pb.GetClusterResponse = await self._stub.GetCluster(
            pb.GetClusterRequest(audit=True), timeout=ASK_TIMEOUT_S
        )
        return answer

    async def _by_grpc(self, work: Work, deadline_s: float, seen: Transcript) -> tuple[Ending, str]:
        try:
            async for response in self._stub.Generate(work.grpc_request(), timeout=deadline_s):
                _take_grpc(response, seen)
        except grpc.aio.AioRpcError as error:
            return _grpc_ending(error)
        return Ending.ANSWERED, ""

    async def _by_http(self, work: Work, seen: Transcript) -> tuple[Ending, str]:
        url = f"{self._http}/v1/completions"
        try:
            if work.kind == "http_whole":
                _take_http(await whole_json(url, work.http_body()), seen)
                return Ending.ANSWERED, ""
            async for event in stream_events(url, work.http_body()):
                if "error" in event:
                    said = json.dumps(event["error"])[:300]
                    retry = event["error"].get("code") in _RETRYABLE_WORDS
                    return (Ending.REFUSED if retry else Ending.WRONG), said
                _take_http(event, seen)
        except ExchangeFailed as error:
            if error.status in _RETRYABLE_STATUSES:
                return Ending.REFUSED, str(error)
            return (Ending.WRONG if error.status else Ending.BROKEN), str(error)
        except (OSError, h11.RemoteProtocolError) as error:
            return Ending.BROKEN, repr(error)
        return Ending.ANSWERED, ""


def _grpc_ending(error: grpc.aio.AioRpcError) -> tuple[Ending, str]:
    said = f"{error.code().name}: {error.details()}"[:300]
    if error.code() in _RETRYABLE_CODES:
        return Ending.REFUSED, said
    return (Ending.EXPIRED if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else Ending.WRONG), said


def _take_grpc(response: pb.GenerateResponse, seen: Transcript) -> None:
    match response.WhichOneof("event"):
        case "started":
            seen.worker = response.started.worker_id
        case "delta":
            delta = response.delta
            seen.delta(delta.choice, delta.text, delta.token_ids, len(delta.logprobs))
        case "finished":
            finished = response.finished
            seen.finish(finished.choice, _REASONS.get(finished.reason, str(finished.reason)))
            if finished.HasField("usage"):
                seen.usage(finished.usage.prompt_tokens, finished.usage.completion_tokens)


def _take_http(event: Mapping[str, Any], seen: Transcript) -> None:
    for choice in event["choices"]:
        if choice.get("text"):
            seen.delta(choice["index"], choice["text"])
        if choice.get("finish_reason"):
            seen.finish(choice["index"], choice["finish_reason"])
    usage = event.get("usage")
    if usage:
        seen.usage(usage["prompt_tokens"], usage["completion_tokens"])


def backoff(attempt: int, chance: random.Random) -> float:
    """Seconds that a polite client waits before it tries again."""
    return min(2.0, 0.1 * 2.0**attempt) * chance.uniform(0.5, 1.0)
