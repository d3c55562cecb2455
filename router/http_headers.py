"""Headers of ours that mean the same in every dialect."""

from __future__ import annotations

from starlette.datastructures import Headers

from kvhive.proto.errors import InvalidRequest
from kvhive.router.field_checks import spell_text

CACHE_KEY_HEADER = "x-kvhive-cache-key"
"""A request's cache_key, for clients whose body has no field for it."""
IGNORED_HEADER = "x-kvhive-ignored"
"""Of an answer: the request's fields that changed nothing, by name, with commas between."""


def cache_key_of(headers: Headers) -> str:
    """Return the cache_key that a request's headers name, or "".

    Raises InvalidRequest where its bytes, which a server hands on as Latin-1, are not UTF-8.
    """
    header = headers.get(CACHE_KEY_HEADER, "")
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        raise InvalidRequest(CACHE_KEY_HEADER, f"must be UTF-8, is {spell_text(header)}") from None
