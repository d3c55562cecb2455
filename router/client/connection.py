"""What both kinds of client know of the way to a server."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message that is taken; a router sends none that is nearly so large."""

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server's limit says it better
    ("grpc.enable_http_proxy", 0),  # a proxy for web pages is in the way to a cluster
    # A long prefill is silent: pings tell it from a server that is gone, and keep gateways from hanging up.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]

ADMIN_TIMEOUT_S = 10.0
"""Of calls that compute nothing."""
TOKENIZE_TIMEOUT_S = 60.0
"""Of those that only tokenise."""


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key; nothing for an empty one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


@dataclass(frozen=True, slots=True)
class Address:
    """Where to, and as whom."""

    target: str
    api_key: str = ""
    credentials: grpc.ChannelCredentials | None = None
    """For TLS; None speaks in clear text."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return key_metadata(self.api_key)
