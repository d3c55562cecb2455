"""The blocking client. One may be shared by threads."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from kvhive.client.answers import Answer
from kvhive.client.connection import ADMIN_TIMEOUT_S, OPTIONS, TOKENIZE_TIMEOUT_S, Address
from kvhive.client.failures import failure
from kvhive.client.messages import (
    Event,
    Options,
    PrewarmOptions,
    Prompt,
    event_of,
    generate_request,
    prewarm_request,
    tokenize_request,
)
from kvhive.client.retrying import LAST, Retry
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc


class Client:
    """Calls to one router; a context manager. Errors are KvhiveErrors; what may be retried is."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str = "",
        retry: Retry = Retry(),  # noqa: B008 - frozen
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`target` is host:port; credentials are for TLS."""
        self._address = Address(target, api_key, credentials)
        self._retry = retry
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; streams that are open end."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Generate, and return the whole answer."""
        answer = Answer()
        for event in self.stream(prompt, timeout_s=timeout_s, **options):
            answer.take(event)
        return answer

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Event]:
        """Generate, event by event. Closing the iterator cancels what is left."""
        return self.send(generate_request(prompt, options), timeout_s)

    def send(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Iterator[Event]:
        """As `stream`, with a request that is made already."""
        until = _deadline(timeout_s)
        attempt, begun = 1, False
        while True:
            call = self._stub.Generate(request, timeout=_left(until), metadata=self._address.metadata)
            try:
                for response in call:
                    begun = True
                    event = event_of(response)
                    if event is not None:
                        yield event
                return
            except grpc.RpcError as error:
                self._wait_or_raise(error, LAST if begun else attempt, until)
            finally:
                call.cancel()
            attempt += 1

    def prewarm(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[PrewarmOptions]
    ) -> pb.PrewarmResponse:
        """Bring a prompt into workers' caches; returns when it is there."""
        answer: pb.PrewarmResponse = self._call(
            self._stub.Prewarm, prewarm_request(prompt, options), timeout_s
        )
        return answer

    def tokenize(self, prompt: str | pb.Chat, *, model: str = "", cache_salt: str = "") -> list[int]:
        """Return the token ids that `generate` would compute."""
        request = tokenize_request(prompt, model, cache_salt)
        answer: pb.TokenizeResponse = self._call(self._stub.Tokenize, request, TOKENIZE_TIMEOUT_S)
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids, special tokens included."""
        request = pb.DetokenizeRequest(token_ids=token_ids, model=model)
        answer: pb.DetokenizeResponse = self._call(self._stub.Detokenize, request, TOKENIZE_TIMEOUT_S)
        return answer.text

    def models(self) -> list[pb.Model]:
        """Return the models that can be named."""
        answer: pb.ListModelsResponse = self._call(self._stub.ListModels, pb.ListModelsRequest())
        return list(answer.models)

    def cluster(self, *, audit: bool = False) -> pb.GetClusterResponse:
        """Return the cluster as the router sees it."""
        answer: pb.GetClusterResponse = self._call(self._stub.GetCluster, pb.GetClusterRequest(audit=audit))
        return answer

    def explain(self, request_id: str) -> list[pb.RouteDecision]:
        """Return why requests of an id went where they did, the oldest first. Raises NotFound."""
        answer: pb.ExplainResponse = self._call(self._stub.Explain, pb.ExplainRequest(request_id=request_id))
        return list(answer.decisions)

    def _call(self, method: Any, request: Any, timeout_s: float | None = ADMIN_TIMEOUT_S) -> Any:
        until, attempt = _deadline(timeout_s), 1
        while True:
            try:
                return method(request, timeout=_left(until), metadata=self._address.metadata)
            except grpc.RpcError as error:
                self._wait_or_raise(error, attempt, until)
            attempt += 1

    def _wait_or_raise(self, error: grpc.RpcError, attempt: int, until: float | None) -> None:
        failed = failure(error, self._address.target)
        wait_s = self._retry.wait_s(failed, attempt, random.random())
        left_s = _left(until)
        if wait_s is None or (left_s is not None and wait_s >= left_s):
            raise failed from error
        time.sleep(wait_s)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
