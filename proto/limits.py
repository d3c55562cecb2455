"""Limits of a request that both the router and a worker keep, each at its own door."""

from __future__ import annotations

MAX_TEMPERATURE = 100
MAX_CACHE_NAME_CHARS = 256
"""Of a cache_salt or a cache_key."""
MAX_REQUEST_ID_CHARS = 128
