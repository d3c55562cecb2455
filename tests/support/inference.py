"""A small asynchronous client of kvhive.v1.Inference for tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvhive.client.connection import key_metadata
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc


@dataclass
class Result:
    """Everything one stream brought."""

    worker_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: pb.Usage | None = None
    reason: int = pb.FINISH_REASON_UNSPECIFIED

    @property
    def cached(self) -> int:
        assert self.usage is not None, "the stream did not finish"
        return int(self.usage.cached_tokens)

    @property
    def found(self) -> int:
        """Prompt tokens that were not computed: in the cache, or pulled from another worker's."""
        assert self.usage is not None, "the stream did not finish"
        return int(self.usage.cached_tokens + self.usage.pulled_tokens)


class Client:
    """Open with `async with`."""

    def __init__(self, address: str, api_key: str = "") -> None:
        self._metadata = key_metadata(api_key)
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(self, request: pb.GenerateRequest, first_token: asyncio.Event | None = None) -> Result:
        """Run a request to its end; sets `first_token` when output begins."""
        result = Result()
        async for response in self.stub.Generate(request, metadata=self._metadata):
            match response.WhichOneof("event"):
                case "started":
                    result.worker_id = response.started.worker_id
                case "delta":
                    result.text += response.delta.text
                    result.token_ids.extend(response.delta.token_ids)
                    if first_token is not None:
                        first_token.set()
                case "finished":
                    result.reason = response.finished.reason
                    if response.finished.HasField("usage"):
                        result.usage = response.finished.usage
        return result

    async def cluster(self) -> pb.GetClusterResponse:
        """Return what the router says of the cluster."""
        response: pb.GetClusterResponse = await self.stub.GetCluster(
            pb.GetClusterRequest(), metadata=self._metadata
        )
        return response

    async def until(self, condition: Any, within_s: float, what: str) -> pb.GetClusterResponse:
        """Poll the cluster until `condition(response)`; fail after `within_s`."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            response = await self.cluster()
            if condition(response):
                return response
            assert asyncio.get_running_loop().time() < deadline, (
                f"after {within_s} s still not {what}: {response}"
            )
            await asyncio.sleep(0.1)


def by_tokens(ids: list[int], max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A greedy request of token ids that runs to max_tokens."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=fields.pop("ignore_eos", True))
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, **fields)


def by_chat(*turns: tuple[str, str], max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A greedy chat request of (role, content) turns."""
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])
    return pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=max_tokens), **fields)
