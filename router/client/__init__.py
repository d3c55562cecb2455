"""A typed Python client of kvhive.v1, in its blocking and its asyncio form.

    from kvhive.client import Chat, ChatMessage, Client

    with Client("127.0.0.1:50051") as client:
        answer = client.generate("The capital of France is", max_tokens=20)
        print(answer.text, answer.usage.cached_tokens)
        chat = Chat(messages=[ChatMessage(role="user", content="Hello!")])
        for event in client.stream(chat, max_tokens=50, timeout_s=60):
            ...

Messages are those of proto/v1/inference.proto, which documents every field; errors are those of
kvhive.proto.errors. It needs grpcio and protobuf, and nothing of what serves.
"""

from kvhive.client.aio_client import AsyncClient
from kvhive.client.answers import Answer, Choice
from kvhive.client.blocking_client import Client
from kvhive.client.failures import NotAllowed, NotFound
from kvhive.client.messages import Event, Options, PrewarmOptions, Prompt
from kvhive.client.retrying import ONCE, Retry
from kvhive.proto.errors import (
    ComputeError,
    InvalidRequest,
    KvhiveError,
    NotNow,
    Overloaded,
    TimedOut,
    Unavailable,
)
from kvhive.proto.v1.inference_pb2 import (
    CacheControl,
    Chat,
    ChatMessage,
    JsonObject,
    Pin,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)

__all__ = [
    "ONCE",
    "Answer",
    "AsyncClient",
    "CacheControl",
    "Chat",
    "ChatMessage",
    "Choice",
    "Client",
    "ComputeError",
    "Event",
    "InvalidRequest",
    "JsonObject",
    "KvhiveError",
    "NotAllowed",
    "NotFound",
    "NotNow",
    "Options",
    "Overloaded",
    "Pin",
    "PrewarmOptions",
    "Prompt",
    "ResponseFormat",
    "Retry",
    "TimedOut",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Unavailable",
    "Usage",
]
