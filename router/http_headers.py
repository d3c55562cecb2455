"""Headers of ours that mean the same in every dialect."""

from __future__ import annotations

import math

from starlette.datastructures import Headers

from kvhive.proto.errors import InvalidRequest, KvhiveError, Overloaded, Unavailable
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import BodyTimeout, BodyTooLarge

CACHE_KEY_HEADER = "x-kvhive-cache-key"
"""A request's cache_key, for clients whose body has no field for it."""
IGNORED_HEADER = "x-kvhive-ignored"
"""Of an answer: the request's fields that changed nothing, by name, with commas between."""
RETRY_AFTER_S = 1.0
"""What Retry-After says where nobody knows better."""


def headers_after(error: KvhiveError) -> dict[str, str]:
    """Return the headers that say how to go on after an error: when, or on another connection."""
    if isinstance(error, BodyTimeout | BodyTooLarge):  # the rest of the body is not read
        return {"connection": "close"}
    if not isinstance(error, Overloaded | Unavailable):
        return {}
    seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    # The official clients read the milliseconds first.
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def cache_key_of(headers: Headers) -> str:
    """Return the cache_key that a request's headers name, or "".

    Raises InvalidRequest where its bytes, which a server hands on as Latin-1, are not UTF-8.
    """
    header = headers.get(CACHE_KEY_HEADER, "")
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        raise InvalidRequest(CACHE_KEY_HEADER, f"must be UTF-8, is {spell_text(header)}") from None
