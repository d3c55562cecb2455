"""This process as a Ray driver: connecting to the cluster that runs the workers, and leaving it.

Importing ray takes most of a second, so it happens in the commands that need it and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.ray_head import head_environment

NAMESPACE = "kvhive"
_PROBE_S = 3.0
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def connected(session: RaySession) -> Iterator[None]:
    """Be a driver of this Ray cluster. Raises ClusterError when it cannot be reached."""
    check_answers(session.address)
    # Ray reads its authentication once per process, from the environment, before anything else.
    if session.owned:
        os.environ.update(head_environment(session.auth_token))
    os.environ["RAY_ADDRESS"] = session.address
    import ray

    host = session.address.rpartition(":")[0]
    extra = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        with _signal_handlers_kept():
            ray.init(
                address=session.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="CRITICAL",
                include_dashboard=False,
                **extra,
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()
        raise ClusterError(
            f"Ray at {session.address} refused this driver: {reason[0] if reason else error!r} "
            "(RAY_AUTH_MODE and RAY_AUTH_TOKEN must be the head's)"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put back what a signal did before: Ray's own handlers end the process in the middle of a clean-up."""
    before = {number: signal.getsignal(number) for number in _OURS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_answers(address: str) -> None:
    """Raise ClusterError when nobody listens at host:port."""
    if not answers(address):
        raise ClusterError(f"no Ray cluster answers at {address!r} (it must be host:port)")


def answers(address: str) -> bool:
    """Whether somebody listens at host:port. Ray itself would retry for a minute before it says no."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            return True
    except (OSError, ValueError):
        return False
