"""`redis.url` is tried before anything starts: one line that names the key, and never the password."""

import socket
import time
from pathlib import Path

import pytest

from kvhive.proto.errors import ConfigError
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.redis_check import check_redis


def refusal(url: str, timeout_s: float = 0.5) -> str:
    with pytest.raises(ConfigError) as caught:
        check_redis(url, timeout_s)
    message = str(caught.value)
    assert message.startswith("redis.url: ") and "\n" not in message and "secret" not in message
    return message


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://localhost", "redis://h:port/0", "redis://:secret/x@h:1", "nonsense"]
)
def test_a_malformed_url_is_refused(url: str) -> None:
    assert "redis://" in refusal(url)


def test_where_nobody_listens_the_reason_is_said_at_once() -> None:
    began = time.monotonic()
    assert "127.0.0.1:1" in refusal("redis://:secret@127.0.0.1:1/0")
    assert time.monotonic() - began < 2


def test_silence_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer within 0.3 s" in refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}", 0.3)


def test_a_wrong_password_is_named_and_the_right_one_passes(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        check_redis(server.url, 2.0)
        address = server.url.rpartition("@")[2]
        assert "user or password" in refusal(f"redis://:secret@{address}")
        assert "user or password" in refusal(f"redis://{address}")
