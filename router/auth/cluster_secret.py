"""What is derived from the cluster's token: the operator's own key, and the salt of each namespace.

Every router of a cluster has the token, also one that was started again, and no cached block outlives it: so
all derive the same, and nothing more has to be kept. The token itself goes nowhere.
"""

from __future__ import annotations

import hmac

from kvhive.proto.block_hash import field
from kvhive.router.auth.principal import Principal


def operator_key(cluster_token: str) -> str:
    """Return the key that the command line shows at the doors."""
    return f"kvh-operator-{_derived(cluster_token, 'operator key').hex()}"


class Namespaces:
    """Gives each namespace cache salts that nobody outside it can name."""

    def __init__(self, cluster_token: str) -> None:
        self._secret = _derived(cluster_token, "cache namespaces")

    def salt(self, principal: Principal, cache_salt: str) -> str:
        """Return the salt of a request that came with a `cache_salt` of its own, or with an empty one."""
        # A namespace that is called as some key is not that key's.
        kind, name = ("namespace", principal.namespace) if principal.namespace else ("key", principal.name)
        parts = (field(part.encode()) for part in (kind, name, cache_salt))
        return hmac.digest(self._secret, b"".join(parts), "sha256").hex()


def _derived(cluster_token: str, purpose: str) -> bytes:
    return hmac.digest(cluster_token.encode(), f"kvhive {purpose}".encode(), "sha256")
