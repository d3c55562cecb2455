"""`autoscaling:` of the configuration: within which bounds, and how fast, workers come and go.

What each key does to a decision is in docs/autoscaling.md; who decides is router/autoscaling_policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhive.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """How many workers there are, by what there is to do."""

    enabled: bool = False
    """Let the number of workers follow the load; `workers.count` is then only what `kvhive up` starts."""
    min_workers: int = 1
    """Fewest workers; 0 lets a cluster that nobody asks anything end its last one."""
    max_workers: int = 8
    """Most workers."""
    interval_s: float = 1.0
    """How often to decide."""
    ttft_goal_s: float = 2.0
    """First tokens are to come within this time ..."""
    ttft_goal_share: float = 0.99
    """... for this share of the requests."""
    target_utilization: float = 0.9
    """Most of the workers' prefill time, of their slots and of their pools that is planned for."""
    startup_s: float = 60.0
    """How long a worker takes to start, until one was seen to; so far ahead the load is forecast."""
    up_cooldown_s: float = 15.0
    """Shortest time between two steps up."""
    down_cooldown_s: float = 60.0
    """Shortest time between two steps down."""
    down_after_s: float = 600.0
    """Fewer workers must have been enough for this long, and no step up have been taken."""
    down_hysteresis: float = 0.05
    """Workers go only where at least this share of them is too much."""
    max_step_up: float = 1.0
    """Most of one step up, as a share of the workers there are; one worker is always allowed."""
    max_step_down: float = 0.1
    """Most of one step down, likewise."""
    idle_s: float = 600.0
    """With `min_workers: 0`: the last worker ends when nobody has asked for anything for this long."""
    hold_requests: int = 256
    """Most requests held while there is no worker; one more is refused."""
    hold_s: float = 120.0
    """Longest that a request is held while there is no worker; then it is refused."""


AUTOSCALING_LIMITS: dict[str, tuple[float, float]] = {
    "autoscaling.min_workers": (0, 10_000),
    "autoscaling.max_workers": (1, 10_000),
    "autoscaling.interval_s": (0.1, 60),
    "autoscaling.ttft_goal_s": (0.01, 3600),
    "autoscaling.ttft_goal_share": (0.5, 0.9999),
    "autoscaling.target_utilization": (0.05, 1),
    "autoscaling.startup_s": (0, 7200),
    "autoscaling.up_cooldown_s": (0, 3600),
    "autoscaling.down_cooldown_s": (0, 86_400),
    "autoscaling.down_after_s": (0, 86_400),
    "autoscaling.down_hysteresis": (0, 0.9),
    "autoscaling.max_step_up": (0, 100),
    "autoscaling.max_step_down": (0, 1),
    "autoscaling.idle_s": (0, 604_800),
    "autoscaling.hold_requests": (0, 1_000_000),
    "autoscaling.hold_s": (0, 3600),
}


def check_autoscaling(config: AutoscalingConfig, count: int) -> None:
    """Refuse what no single key is to blame for; `count` is `workers.count`. Raises ConfigError.

    A start waits for `count` workers, and the policy would end those beyond its bounds before they serve.
    """
    if config.min_workers > config.max_workers:
        raise ConfigError(
            f"autoscaling.max_workers: must be at least autoscaling.min_workers ({config.min_workers}), "
            f"is {config.max_workers}"
        )
    if config.enabled and count > config.max_workers:
        raise ConfigError(
            f"workers.count: must be at most autoscaling.max_workers ({config.max_workers}) while "
            f"autoscaling.enabled, is {count}"
        )
    if config.enabled and count < config.min_workers:
        raise ConfigError(
            f"workers.count: must be at least autoscaling.min_workers ({config.min_workers}) while "
            f"autoscaling.enabled, is {count}"
        )
