"""Checks of one field of a request, each a pure function that names field, limit and value."""

from __future__ import annotations

from collections.abc import Sequence

from kvhive.proto.errors import InvalidRequest


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Check low <= value <= high; NaN and infinities never are. Raises InvalidRequest."""
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be between {low} and {high}, is {spell_number(value)}")


def check_above_zero(name: str, value: float, high: float) -> None:
    """Check 0 < value <= high. Raises InvalidRequest."""
    check_range(name, value, 0, high)
    if value == 0:
        raise InvalidRequest(name, f"must be above 0 and at most {high}, is 0")


def check_text(name: str, text: str) -> None:
    """Check that text can be encoded as UTF-8. Raises InvalidRequest at a lone surrogate."""
    try:
        text.encode()  # a tenth of what a search takes
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            name,
            f"must be valid Unicode, has the lone surrogate U+{ord(text[error.start]):04X} at {error.start}",
        ) from None


def check_chars(name: str, text: str, limit: int) -> None:
    """Check that text is well formed and has at most `limit` characters. Raises InvalidRequest."""
    if len(text) > limit:
        raise InvalidRequest(name, f"must be at most {limit} characters, is {len(text)}")
    check_text(name, text)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that there are ids, each in the vocabulary. Raises InvalidRequest naming the first bad one."""
    if not token_ids:
        raise InvalidRequest(name, "must not be empty")
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    raise InvalidRequest(
        f"{name}[{index}]", f"must be between 0 and {vocab_size - 1}, is {spell_number(bad)}"
    )


def spell_number(value: float) -> str:
    """Spell a caller's number without letting a huge integer make a huge message."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    return f"{value}"


def spell_text(text: str) -> str:
    """Quote a caller's text for a message, shortened and in ASCII."""
    return ascii(text if len(text) <= 64 else text[:64] + "...")
