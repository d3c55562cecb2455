"""Objects of a body, read field by field: what nobody took is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.field_checks import check_text, spell_text
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import number, typed
from kvhive.router.schema_text import schema_text


class Ignored:
    """The names of fields that change nothing here, each once, in the order in which they were met."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def note(self, name: str) -> None:
        """Remember a name, which is one of ours: it goes into a header."""
        self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._names)


class Fields:
    """One object. A field that is null is as good as absent."""

    def __init__(self, where: str, value: object, ignored: Ignored) -> None:
        """Begin to read; `where` is the object's path, "" for the body. Raises InvalidRequest."""
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be an object, is {json_type(value)}")
        self.where = where
        self.ignored = ignored
        self._left = {name: item for name, item in value.items() if item is not None}

    def path(self, name: str) -> str:
        """Return how an error names a field."""
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, kind: type, default: Any) -> Any:
        """Return a field of exactly this JSON type, or the default. Raises InvalidRequest."""
        if name not in self._left:
            return default
        path = self.path(name)
        return typed({path: self._left.pop(name)}, path, kind, default)

    def need(self, name: str, kind: type) -> Any:
        """Return a field that must be there. Raises InvalidRequest."""
        if name not in self._left:
            raise InvalidRequest(self.path(name), "is required")
        return self.take(name, kind, None)

    def number(self, name: str, default: float) -> float:
        """Return a number, or the default. Raises InvalidRequest."""
        path = self.path(name)
        return number({path: self._left.pop(name, default)}, path, default)

    def need_json(self, name: str) -> str:
        """Return an object that must be there, as JSON. Raises InvalidRequest."""
        path, value = self.path(name), self.need(name, dict)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except RecursionError as error:
            raise InvalidRequest(path, "is nested too deeply") from error
        except ValueError as error:  # a number beyond all floats
            raise InvalidRequest(path, f"must be JSON: {error}") from error
        check_text(path, text)
        return text

    def need_schema(self, name: str) -> str:
        """Return a JSON Schema that must be there, as JSON. Raises InvalidRequest."""
        return schema_text(self.path(name), self.need(name, dict))

    def take_any(self, name: str) -> Any:
        """Return a field of whatever type, or None."""
        return self._left.pop(name, None)

    def one_of(self, name: str, allowed: Collection[str]) -> str:
        """Return a word that must be there and be one of these. Raises InvalidRequest."""
        word: str = self.need(name, str)
        if word not in allowed:
            choice = ", ".join(allowed)
            raise InvalidRequest(self.path(name), f"must be one of {choice}, is {spell_text(word)}")
        return word

    def child(self, name: str) -> Fields | None:
        """Return an object in this one, or None. Raises InvalidRequest."""
        value = self._left.pop(name, None)
        return None if value is None else Fields(self.path(name), value, self.ignored)

    def ignore(self, names: Mapping[str, str]) -> None:
        """Take fields that change nothing, by name, with what the answer's header calls them."""
        for name, known_as in names.items():
            if self._left.pop(name, None) is not None:
                self.ignored.note(known_as)

    def only(self, name: str, values: Collection[object]) -> None:
        """Take a field that may ask for nothing: for one of these values. Raises InvalidRequest."""
        value = self._left.pop(name, None)
        # A boolean equals a number in Python but not in JSON.
        if value is not None and not any(value == v and type(value) is type(v) for v in values):
            only = " or ".join(repr(v) for v in values)
            raise InvalidRequest(self.path(name), f"is not supported, other than {only}")

    def close(self) -> None:
        """End reading. Raises InvalidRequest for a field that nobody took."""
        for name in self._left:
            raise InvalidRequest(self.path(ascii(name[:64])[1:-1]), "is not supported")
