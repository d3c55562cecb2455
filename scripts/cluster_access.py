"""The key that a command shows at the doors of its cluster.

Whoever can read the state file is the cluster's operator, and has the operator's key. `KVHIVE_API_KEY` makes
`generate`, `chat`, `prewarm` and `explain` ask in the name of another key: as its tenant, in its caches.
"""

from __future__ import annotations

import os

from kvhive.router.auth.cluster_secret import operator_key
from kvhive.scripts.cluster_state import ClusterState

KEY_VARIABLE = "KVHIVE_API_KEY"


def operators_key(state: ClusterState) -> str:
    """Return the key that opens everything; it is shown to a cluster without keys, too, and ignored there."""
    return operator_key(state.cluster_token)


def callers_key(state: ClusterState) -> str:
    """Return the key to ask a model with."""
    return os.environ.get(KEY_VARIABLE) or operators_key(state)
