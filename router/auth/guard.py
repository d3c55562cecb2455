"""Who is let in where: one guard for every HTTP route and every RPC.

All is shut but what says that the process lives: a route or an RPC that is added later is guarded from its
first day. The two doors only say in their own words what it decides.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterable

from kvhive.proto.errors import KvhiveError
from kvhive.router.auth.key_list import KeyList
from kvhive.router.auth.principal import OPERATOR, Principal

OPEN_PATH = "/healthz"
OPEN_SERVICE = "/grpc.health.v1.Health/"
"""What needs no key: an orchestrator has none, and learns whether we live and serve."""
ADMIN_PATHS = frozenset({"/metrics", "/kvhive.v1.Inference/GetCluster"})
"""What tells of the whole cluster, and so of everybody in it."""


class Refused(KvhiveError):
    """The caller is not let in."""


class Unauthenticated(Refused):
    """There is no key, or it is nobody's."""


class Forbidden(Refused):
    """The key's holder may not do this."""


class Guard:
    """Knows keys by what a function returns, and the operator's."""

    def __init__(self, keys: Callable[[], KeyList], operator_key: str) -> None:
        self.keys = keys
        self._operator_key = operator_key.encode()
        self.refused: Counter[str] = Counter()
        """By why."""

    def admit(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Principal | None:
        """Return who asks for a route, or for an RPC by its full name; None where anybody may.

        Raises Unauthenticated, Forbidden. Takes microseconds, and of the request only its headers (names in
        lower case).
        """
        if path == OPEN_PATH or path.startswith(OPEN_SERVICE):
            return None
        key = _presented(headers)
        principal = self._holder(key)
        if principal is None:
            self.refused["unknown_key" if key else "no_key"] += 1
            raise Unauthenticated(
                "this API key is not known"
                if key
                else "an API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        if path in ADMIN_PATHS and not principal.admin:
            self.refused["not_admin"] += 1
            raise Forbidden(f"{path} needs a key with `admin: true`, which {principal.name!r} has not")
        return principal

    def _holder(self, key: str) -> Principal | None:
        if hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._operator_key):
            return OPERATOR
        return self.keys().holder(key)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the key that a caller shows: a bearer's, or else `x-api-key`, as Anthropic's clients send it."""
    given = dict(headers)
    scheme, _, token = given.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"").strip()
    return key.decode("utf-8", "surrogateescape")
