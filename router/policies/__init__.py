"""Ways to choose a worker, by name: `kv_aware`, plain ones to compare it with, and users' own."""

from kvhive.router.policies.by_name import ENTRY_POINTS, make_policy, policy_names

__all__ = ["ENTRY_POINTS", "make_policy", "policy_names"]
