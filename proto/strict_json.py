"""A JSON object of a client's, read strictly: what is read can be written again, as JSON and as UTF-8."""

from __future__ import annotations

import json
import math
from typing import Any

from kvhive.proto.errors import InvalidRequest


def json_object(field: str, text: str, what: str = "") -> dict[str, Any]:
    """Read a JSON object. Raises InvalidRequest naming the field, and of it `what`.

    Python's reader alone takes NaN, Infinity and 1e999, and makes half of a surrogate pair of one's escape.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest(field, f"{what}must be a JSON object, is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise InvalidRequest(
            field, f"{what}must be a JSON object of whole characters, has the lone surrogate {half}"
        ) from None
    except ValueError as error:
        raise InvalidRequest(field, f"{what}must be a JSON object, is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{what}must be a JSON object, is {type(value).__name__}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is none")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is beyond every number")
    return value
