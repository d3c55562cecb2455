"""API keys as a file has them: one JSON object a line, with a key's SHA-256 and never the key.

    {"name": "alice", "sha256": "<64 hex digits>", "namespace": "team", "max_priority": 0, "admin": false}

Only name and sha256 must be there; empty lines and lines that begin with # are skipped. A key is 256 random
bits of `new_key`: no list of likely ones could be tried, which is all that a slow hash is for.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhive.proto.errors import ConfigError
from kvhive.proto.limits import MAX_PRIORITY
from kvhive.router.auth.principal import Principal

MAX_KEYS = 10_000
"""Some 5 MB in memory, and 50 ms to read."""
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_PRESENTED_CHARS = 256
"""A longer key is nobody's: what strangers send is not even hashed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "sha256", "namespace", "max_priority", "admin")


def new_key() -> str:
    """Make a key."""
    return f"kvh-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """Return what the file has of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyList:
    """Who holds which key."""

    by_digest: Mapping[str, Principal] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.by_digest)

    def holder(self, key: str) -> Principal | None:
        """Return whose key it is, if it is anybody's.

        How long that takes can only tell of the digest, which nobody can steer: no key is compared.
        """
        return None if len(key) > MAX_PRESENTED_CHARS else self.by_digest.get(key_digest(key))


def parse_keys(text: str) -> KeyList:
    """Read a file's text. Raises ConfigError naming the line and the field."""
    by_digest: dict[str, Principal] = {}
    names: set[str] = set()
    for number, line in key_lines(text):
        if len(by_digest) >= MAX_KEYS:
            raise ConfigError(f"line {number}: there must be at most {MAX_KEYS} keys")
        try:
            digest, principal = _parse(line)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from error
        if principal.name in names:
            raise ConfigError(f"line {number}: name: {principal.name!r} is another key's already")
        if digest in by_digest:
            raise ConfigError(f"line {number}: sha256: is the key of {by_digest[digest].name!r} already")
        names.add(principal.name)
        by_digest[digest] = principal
    return KeyList(by_digest)


def key_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold a key, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def key_line(digest: str, principal: Principal) -> str:
    """Return the line of one key, which `parse_keys` reads back. Raises ConfigError for a bad name."""
    given: dict[str, Any] = {"name": principal.name, "sha256": digest}
    if principal.namespace:
        given["namespace"] = principal.namespace
    if principal.max_priority != MAX_PRIORITY:
        given["max_priority"] = principal.max_priority
    if principal.admin:
        given["admin"] = True
    line = json.dumps(given)
    _parse(line)
    return line


def _parse(line: str) -> tuple[str, Principal]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("must be a JSON object") from error
    if not isinstance(given, dict):
        raise ConfigError("must be a JSON object")
    _check_known(given)
    digest = given.get("sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError("sha256: must be 64 hex digits in lower case")  # and is not shown: it may be a key
    namespace = given.get("namespace", "")
    priority = given.get("max_priority", MAX_PRIORITY)
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ConfigError(
            f"max_priority: must be a whole number between -{MAX_PRIORITY} and {MAX_PRIORITY}, "
            f"is {_shown(priority)}"
        )
    admin = given.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"admin: must be true or false, is {_shown(admin)}")
    name = _name("name", given.get("name"))
    return digest, Principal(name, _name("namespace", namespace) if namespace else "", priority, admin)


def _check_known(given: Iterable[str]) -> None:
    for key in given:
        if key not in _FIELDS:
            raise ConfigError(f"{_shown(key)}: unknown field, known ones are {', '.join(_FIELDS)}")


def _name(where: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{where}: must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', beginning with a letter or digit; "
            f"is {_shown(value)}"
        )
    return value


def _shown(value: object) -> str:
    return ascii(value)[:80]
