"""Waiting until the router sends requests to the workers that the launcher started."""

from __future__ import annotations

import time

from kvhive.proto.errors import ClusterError, Unavailable
from kvhive.scripts.client import RouterClient

_ROUTABLE_TIMEOUT_S = 30.0
_POLL_S = 0.1


def wait_routable(grpc_target: str, count: int) -> None:
    """Wait until the router sends requests to `count` workers. Raises ClusterError after 30 s.

    A worker whose model files or block size are not the router's is never routable.
    """
    deadline = time.monotonic() + _ROUTABLE_TIMEOUT_S
    routable = 0
    with RouterClient(grpc_target) as client:
        while True:
            try:
                routable = sum(worker.routable for worker in client.cluster().workers)
            except Unavailable:
                routable = 0
            if routable >= count:
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"after {_ROUTABLE_TIMEOUT_S:g} s the router accepts {routable} of {count} workers "
                    "(is the model the same everywhere?)"
                )
            time.sleep(_POLL_S)
