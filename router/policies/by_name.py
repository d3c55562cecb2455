"""Makes a routing policy of its name: one of ours, or one that an installed package offers.

A package offers one in the entry point group `kvhive.routing_policies`: a callable `make(seed: int | None)`
that returns a RoutingPolicy (routing_policy.py). Ours go first, so no package can replace one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from kvhive.proto.errors import ConfigError
from kvhive.router.policies.consistent_hash import ConsistentHash
from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.policies.least_loaded import LeastLoaded
from kvhive.router.policies.power_of_two import PowerOfTwo
from kvhive.router.policies.round_robin import RoundRobin
from kvhive.router.routing_policy import RoutingPolicy

ENTRY_POINTS = "kvhive.routing_policies"

_OURS: dict[str, Callable[[int | None], RoutingPolicy]] = {
    "kv_aware": lambda seed: KvAwarePolicy(),
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "consistent_hash": lambda seed: ConsistentHash(),
}


def policy_names() -> tuple[str, ...]:
    """Return every name that `make_policy` knows now: ours first, then those of packages, sorted."""
    return (*_OURS, *sorted(set(_offered()) - set(_OURS)))


def make_policy(name: str, seed: int | None = None) -> RoutingPolicy:
    """Return a new policy. Raises ConfigError naming the known ones, or what is wrong with a package's.

    seed: of whatever the policy leaves to chance; None differs from router to router
    """
    if name in _OURS:
        return _OURS[name](seed)
    entry = _offered().get(name)
    if entry is None:
        raise ConfigError(f"router.policy: must be one of {', '.join(policy_names())}, is {name!r}")
    try:
        policy: RoutingPolicy = entry.load()(seed)
    except Exception as error:  # whatever a stranger's code raises: said at the start, never met by a request
        raise ConfigError(f"router.policy: {name!r} ({entry.value}) cannot be made: {error!r}") from error
    if not callable(getattr(policy, "decide", None)):
        raise ConfigError(f"router.policy: {name!r} ({entry.value}) made {type(policy)}, which cannot decide")
    return policy


def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
