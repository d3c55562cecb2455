"""A client of the router's gRPC door, as the command line uses it."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import grpc

from kvhive.proto.errors import InvalidRequest, KvhiveError, Overloaded, Unavailable
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc

_ADMIN_TIMEOUT_S = 10.0
_MESSAGE_BYTES = 64 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key; nothing for an empty one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class RouterClient:
    """Blocking calls to one router; usable as a context manager. Errors are those of proto/errors.py."""

    def __init__(self, target: str, api_key: str = "") -> None:
        """Prepare; without a key the router must have none either."""
        self._target = target
        self._metadata = key_metadata(api_key)
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def cluster(self) -> pb.GetClusterResponse:
        """Return the cluster as the router sees it. Raises KvhiveError."""
        try:
            answer: pb.GetClusterResponse = self._stub.GetCluster(
                pb.GetClusterRequest(), timeout=_ADMIN_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._translate(error) from error
        return answer

    def prewarm(self, request: pb.PrewarmRequest) -> pb.PrewarmResponse:
        """Bring a prompt into some workers' caches; returns when it is there. Raises KvhiveError."""
        try:
            answer: pb.PrewarmResponse = self._stub.Prewarm(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        return answer

    def generate(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """Stream one generation. Closing the iterator cancels it. Raises KvhiveError."""
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            call.cancel()

    def _translate(self, error: grpc.RpcError) -> KvhiveError:
        assert isinstance(error, grpc.Call)
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            field, _, message = details.partition(": ")
            return InvalidRequest(field, message) if message else InvalidRequest("request", details)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(details)
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"the router at {self._target} is not available: {details}")
        return KvhiveError(f"{code.name.lower()}: {details}")
