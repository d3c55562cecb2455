"""The key-value header of a GGUF file, read without its tensors and without torch.

The format is llama.cpp's (ggml/docs/gguf.md): magic, version, counts, then typed little-endian pairs.
Every length is checked against the file, so a damaged file is an error and never a huge allocation.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from kvhive.proto.errors import ModelError

GgufValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, GgufValue]:
    """Return all metadata of a GGUF file. Raises ModelError when it is missing or damaged."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Reader(view).metadata()
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from error


class _Reader:
    """A cursor over the mapped file. Raises ValueError or struct.error where the file ends too soon."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._at = 0

    def metadata(self) -> dict[str, GgufValue]:
        if self._bytes(4) != _MAGIC:
            raise ValueError("the magic number is not GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        self._number("Q")  # the number of tensors
        pairs = int(self._number("Q"))
        found: dict[str, GgufValue] = {}
        for _ in range(pairs):
            key = self._string()
            found[key] = self._value(int(self._number("I")))
        return found

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._format(kind))

    def _array(self) -> GgufValue:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        code = self._format(kind)
        raw = self._bytes(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind} before byte {self._at}")
        return _SCALARS[kind]

    def _number(self, code: str) -> int | float:
        (number,) = struct.unpack_from("<" + code, self._view, self._at)
        self._at += struct.calcsize("<" + code)
        return number  # type: ignore[no-any-return]

    def _string(self) -> str:
        return self._bytes(int(self._number("Q"))).decode()

    def _bytes(self, size: int) -> bytes:
        if size > len(self._view) - self._at:
            raise ValueError(f"{size} bytes are promised at byte {self._at}, but the file ends before")
        raw = self._view[self._at : self._at + size]
        self._at += size
        return raw
