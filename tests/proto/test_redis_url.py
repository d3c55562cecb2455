"""Every form of redis.url, and what is said of the others."""

from __future__ import annotations

import pytest

from kvhive.proto.errors import ConfigError
from kvhive.proto.redis_url import RedisKind, RedisTarget, parse_redis_url


@pytest.mark.parametrize(
    ("url", "nodes", "options"),
    [
        ("redis://localhost", [("localhost", 6379)], {}),
        ("redis://", [("localhost", 6379)], {}),
        ("redis://10.0.0.1:7000/3", [("10.0.0.1", 7000)], {"db": 3}),
        ("redis://h/?db=2&protocol=3", [("h", 6379)], {"db": 2, "protocol": 3}),
        ("redis://[::1]:7000", [("::1", 7000)], {}),
        ("redis://:pa%2Fss@h", [("h", 6379)], {"password": "pa/ss"}),
        ("redis://me:p@ss@h", [("h", 6379)], {"username": "me", "password": "p@ss"}),
        (
            "rediss://h:6380?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false",
            [("h", 6380)],
            {"ssl": True, "ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False},
        ),
        ("unix:///run/r.sock?db=1", [], {"unix_socket_path": "/run/r.sock", "db": 1}),
        (
            "unix://me:pw@/run/r.sock",
            [],
            {"unix_socket_path": "/run/r.sock", "username": "me", "password": "pw"},
        ),
    ],
)
def test_one_server(url: str, nodes: list[tuple[str, int]], options: dict[str, object]) -> None:
    assert parse_redis_url(url) == RedisTarget(RedisKind.SINGLE, tuple(nodes), options=options)  # type: ignore[arg-type]


def test_sentinels() -> None:
    """Each has its default port; a password of the sentinels' own is not the master's."""
    target = parse_redis_url(
        "rediss+sentinel://me:pw@a,b:2/main/4?sentinel_password=other&ssl_ca_certs=/ca.pem"
    )
    assert (target.kind, target.service) == (RedisKind.SENTINEL, "main")
    assert target.nodes == (("a", 26379), ("b", 2))
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert target.options == {"username": "me", "password": "pw", "db": 4, **tls}
    assert target.sentinel_options == {"password": "other", **tls}


def test_a_cluster() -> None:
    target = parse_redis_url("redis+cluster://:pw@a:1,b:2,[::1]:3/0")
    assert (target.kind, target.options) == (RedisKind.CLUSTER, {"password": "pw"})
    assert target.nodes == (("a", 1), ("b", 2), ("::1", 3))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "another scheme"),
        ("nonsense", "another scheme"),
        ("", "another scheme"),
        ("redis+magic://h", "another scheme"),
        ("http://h", "another scheme"),
        ("redis://h:port/0", "a port from 1 to 65535"),
        ("redis://h:0", "a port from 1 to 65535"),
        ("redis://h:65536", "a port from 1 to 65535"),
        ("redis://:secret/x@h:1", "a port from 1 to 65535"),
        ("redis://:sec#ret@h:1", "a '#' in it"),
        ("redis://:sec?ret@h:1", "an unknown option"),
        ("redis://h/one", "not the number of a db"),
        ("redis://h/1/2", "not the number of a db"),
        ("redis://a,b", "names several hosts"),
        ("redis://h?color=secret", "an unknown option after the '?', known are client_name"),
        ("redis://h?db=x", "a db that is not a number from 0 to 1000000"),
        ("redis://h?ssl_ca_certs=/ca.pem", "its scheme must be rediss"),
        ("redis+cluster://h?ssl_ca_certs=/ca.pem", "its scheme must be rediss+cluster"),
        ("rediss://h?ssl_ca_certs=", "an empty ssl_ca_certs"),
        ("rediss://h?ssl_cert_reqs=maybe", "not one of required, optional, none"),
        ("rediss://h?ssl_check_hostname=maybe", "neither true nor false"),
        ("redis+sentinel://h:1", "must name the sentinels' service"),
        ("redis+sentinel:///main", "a port from 1 to 65535"),
        ("redis+cluster://h/1", "has only db 0"),
        ("unix://", "the absolute path of a socket"),
        ("unix://run/r.sock", "the absolute path of a socket"),
        ("redis://[::1", "cannot be read"),
    ],
)
def test_what_is_refused_and_why(url: str, words: str) -> None:
    """The reason and every form are said; nothing of the URL is, since any part may be of a password."""
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    message = str(caught.value)
    assert message.startswith("redis.url: ") and words in message and "redis+sentinel://" in message
    assert "secret" not in message and "\n" not in message


def test_a_target_does_not_show_its_password() -> None:
    assert "secret" not in repr(parse_redis_url("redis+sentinel://:secret@h/m?sentinel_password=secret"))
