"""Limits of a request that both the router and a worker keep, each at its own door."""

from __future__ import annotations

MAX_CHOICES = 16
"""Answers to one prompt: each is a sequence of its own in a worker."""
MAX_TEMPERATURE = 100
MAX_PENALTY = 2
"""Of frequency and presence penalties, either way."""
MAX_REPETITION_PENALTY = 10
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100
"""Either way; that much forbids a token, or leaves no other."""
MAX_LOGPROBS = 20
"""Alternatives per token: bounds what one request makes a worker compute and send."""
MAX_PRIORITY = 10
"""Either way."""
MAX_CACHE_NAME_CHARS = 256
"""Of a cache_salt or a cache_key."""
MAX_TENANT_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_PINS = 16
"""Breakpoints of one prompt."""
MAX_PIN_TTL_S = 86_400.0
"""Longest lease of a pin, in seconds."""
