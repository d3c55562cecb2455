"""Usage in Anthropic's shape: what the cache gave, what was written to stay in it, and the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvhive.router.frontend import Usage
from kvhive.router.pins import cache_split

_HOUR_S = 3600.0


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return usage with the cache's own report under `kvhive`.

    The three kinds of input tokens add up to the prompt's.
    """
    split = cache_split(usage)
    hour = sum(tokens for ttl_s, tokens in split.created.items() if ttl_s >= _HOUR_S)
    total = sum(split.created.values())
    return {
        "input_tokens": split.plain,
        "cache_creation_input_tokens": total,
        "cache_read_input_tokens": split.read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": total - hour,
            "ephemeral_1h_input_tokens": hour,
        },
        "output_tokens": usage.completion_tokens,
        "kvhive": {
            "worker_id": usage.worker_id,
            "route_reason": usage.route_reason,
            "reachable_tokens": usage.reachable_tokens,
            "written_tokens": usage.written_tokens,
            "pulled_tokens": usage.pulled_tokens,
            "failovers": usage.failovers,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "kept": [dataclasses.asdict(prefix) for prefix in usage.kept],
            "not_kept": usage.not_kept or None,
        },
    }


def expected_usage(prompt_tokens: int) -> dict[str, Any]:
    """Return what is known of a stream's usage at its beginning; its end has the truth."""
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
