"""Usage in Anthropic's shape: what the cache gave, what was written to stay in it, and the rest."""

from __future__ import annotations

from typing import Any

from kvhive.router.frontend import Usage

_HOUR_S = 3600.0


def cache_split(usage: Usage) -> tuple[int, dict[float, int], int]:
    """Return (tokens read, tokens written to stay by their TTL in seconds, the other prompt tokens)."""
    done, created = usage.cached_tokens, dict[float, int]()
    for prefix in sorted((p for p in usage.kept if p.kept), key=lambda p: p.tokens):
        new = min(prefix.tokens, usage.prompt_tokens) - done
        if new > 0:
            created[prefix.ttl_s] = created.get(prefix.ttl_s, 0) + new
            done += new
    return usage.cached_tokens, created, usage.prompt_tokens - done


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return usage with the cache's own report under `kvhive`.

    The three kinds of input tokens add up to the prompt's.
    """
    read, created, plain = cache_split(usage)
    hour = sum(tokens for ttl_s, tokens in created.items() if ttl_s >= _HOUR_S)
    total = sum(created.values())
    return {
        "input_tokens": plain,
        "cache_creation_input_tokens": total,
        "cache_read_input_tokens": read,
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
            "kept": [{"tokens": p.tokens, "ttl_s": p.ttl_s, "kept": p.kept} for p in usage.kept],
            "not_kept": usage.not_kept,
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
