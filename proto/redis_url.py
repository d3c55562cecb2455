"""Where a Redis is: `redis.url` read strictly, into plain values. No I/O.

    redis://[[user]:password@]host[:port][/db]                      one server
    unix://[[user]:password@]/path/of/the/socket[?db=0]             ... on this machine
    redis+sentinel://[[user]:password@]host[:port],.../service[/db] whoever the sentinels call its master
    redis+cluster://[[user]:password@]host[:port],...               a Redis Cluster, found by any of these

`rediss` instead of `redis` means TLS, with the options of redis-py after the `?`: ssl_ca_certs (a file of
authorities), ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname. What is special in a user or a
password is percent-encoded. No error here quotes what may be a piece of a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvhive.proto.errors import ConfigError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
FORMS = (
    "it must be redis://[[user]:password@]host:port/db, rediss://, unix:///path, "
    "redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port "
    "(percent-encode what is special in a password)"
)

Option = str | int | bool
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/?#@]+)(?::([0-9]{1,5}))?")
_YES_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_TEXT_OPTIONS = {"client_name", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}
_NUMBER_OPTIONS = {"db": (0, 1_000_000), "protocol": (2, 3), "health_check_interval": (0, 86_400)}
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


class RedisKind(StrEnum):
    """Who is asked."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A Redis, ready to be handed to a client library."""

    kind: RedisKind
    nodes: tuple[tuple[str, int], ...]
    """host and port: of the server, of each sentinel, or of some nodes of the cluster; none for a socket."""
    service: str = ""
    """The name under which sentinels know the master."""
    options: dict[str, Option] = field(default_factory=dict, repr=False)
    """Keyword arguments of redis-py's connections: username, password, db, ssl..., unix_socket_path."""
    sentinel_options: dict[str, Option] = field(default_factory=dict, repr=False)
    """... of the connections to the sentinels."""


def parse_redis_url(url: str) -> RedisTarget:
    """Read a URL of one of this file's forms. Raises ConfigError, which never shows the URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _refused("cannot be read") from None
    scheme, _, kind = parts.scheme.partition("+")
    if scheme == "unix" and not kind:
        return _socket(parts)
    if scheme not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        raise _refused("has another scheme")
    if parts.fragment:
        raise _refused("has a '#' in it")
    user, hosts = _split_user(parts.netloc)
    options = {**user, **_query(parts.query, kind)}
    if scheme == "rediss":
        options["ssl"] = True
    elif any(name.startswith("ssl") for name in options):
        raise _refused(f"has TLS options, so its scheme must be rediss{'+' * bool(kind)}{kind}")
    segments = [unquote(segment) for segment in parts.path.split("/")[1:] if segment]
    if kind == "sentinel":
        return _sentinel(hosts, segments, options)
    if kind == "cluster":
        return _cluster(hosts, segments, options)
    nodes = _nodes(hosts or "localhost", DEFAULT_PORT)
    if len(nodes) > 1:
        raise _refused("names several hosts, which redis+sentinel:// and redis+cluster:// do")
    return RedisTarget(RedisKind.SINGLE, nodes, options=_with_db(options, segments))


def _socket(parts: SplitResult) -> RedisTarget:
    user, host = _split_user(parts.netloc)
    if host or not parts.path.strip("/"):
        raise _refused("must have the absolute path of a socket, as in unix:///run/redis.sock")
    options = {**user, **_query(parts.query, ""), "unix_socket_path": unquote(parts.path)}
    return RedisTarget(RedisKind.SINGLE, (), options=options)


def _sentinel(hosts: str, segments: list[str], options: dict[str, Option]) -> RedisTarget:
    if not segments:
        raise _refused("must name the sentinels' service, as in redis+sentinel://host:26379/mymaster")
    own = {_SENTINEL_OPTIONS[name]: options.pop(name) for name in _SENTINEL_OPTIONS if name in options}
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    nodes = _nodes(hosts, DEFAULT_SENTINEL_PORT)
    options = _with_db(options, segments[1:])
    return RedisTarget(RedisKind.SENTINEL, nodes, segments[0], options, {**shared, **own})


def _cluster(hosts: str, segments: list[str], options: dict[str, Option]) -> RedisTarget:
    if _with_db(options, segments).pop("db", 0) != 0:
        raise _refused("names a db, and a Redis Cluster has only db 0")
    options.pop("db", None)
    return RedisTarget(RedisKind.CLUSTER, _nodes(hosts, DEFAULT_PORT), options=options)


def _split_user(netloc: str) -> tuple[dict[str, Option], str]:
    userinfo, _, hosts = netloc.rpartition("@")
    username, colon, password = userinfo.partition(":")
    found: dict[str, Option] = {}
    if username:
        found["username"] = unquote(username)
    if colon and password:
        found["password"] = unquote(password)
    return found, hosts


def _nodes(hosts: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for each in hosts.split(","):
        found = _HOST.fullmatch(each)
        port = int(found[2] or default_port) if found else 0
        if found is None or not 1 <= port <= 65_535:
            raise _refused("needs a host with a port from 1 to 65535")
        nodes.append((found[1].strip("[]"), port))
    return tuple(nodes)


def _with_db(options: dict[str, Option], segments: list[str]) -> dict[str, Option]:
    if not segments:
        return options
    if len(segments) > 1 or not (segments[0].isascii() and segments[0].isdigit()):
        raise _refused("has a path that is not the number of a db")
    return {**options, "db": int(segments[0])}


def _query(query: str, kind: str) -> dict[str, Option]:
    known = {*_TEXT_OPTIONS, *_NUMBER_OPTIONS, "ssl_check_hostname"}
    if kind == "sentinel":
        known |= set(_SENTINEL_OPTIONS)
    found: dict[str, Option] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise _refused(f"has an unknown option after the '?', known are {', '.join(sorted(known))}")
        found[name] = _option(name, value)
    return found


def _option(name: str, value: str) -> Option:
    if name in _NUMBER_OPTIONS:
        low, high = _NUMBER_OPTIONS[name]
        if not (value.isascii() and value.isdigit() and low <= int(value) <= high):
            raise _refused(f"has a {name} that is not a number from {low} to {high}")
        return int(value)
    if name == "ssl_check_hostname":
        if value.lower() not in _YES_NO:
            raise _refused(f"has a {name} that is neither true nor false")
        return _YES_NO[value.lower()]
    if name == "ssl_cert_reqs" and value not in ("required", "optional", "none"):
        raise _refused(f"has a {name} that is not one of required, optional, none")
    if not value:
        raise _refused(f"has an empty {name}")
    return value


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"redis.url: {reason}; {FORMS}")
