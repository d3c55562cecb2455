"""The header of a GGUF file: its metadata and where each tensor's bytes are.

Our own reader, because reading the vocabulary token by token makes the general one take seconds, and
because a damaged file must be a ModelError and not a loop of 2⁶⁴ steps. Format: the GGUF specification in
ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvhive.proto.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_KEPT_ARRAY = 4096
"""Longer arrays are skipped, and so are arrays of strings that nobody asked for by name."""
_DEFAULT_ALIGNMENT = 32

MetadataValue = int | float | bool | str | tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    kind: str
    """Name of the ggml type, such as `F32` or `Q4_1`."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file."""

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    strings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The arrays of strings that were asked for, as far as the file has them."""


def read_gguf(path: Path, strings: Container[str] = ()) -> GgufFile:
    """Read the header, and those arrays of strings whose keys are in `strings`.

    Raises ModelError when the file is missing, damaged, truncated or of another kind."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, strings).read()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error


class _Reader:
    """A cursor over the mapped file; whatever lies outside the file is a ModelError."""

    def __init__(self, path: Path, data: mmap.mmap, strings: Container[str]) -> None:
        self._path = path
        self._data = data
        self._wanted = strings
        self._strings: dict[str, tuple[str, ...]] = {}
        self._offset = 0

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise self._damaged("does not start with GGUF")
        self._offset = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._damaged(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, pair_count = int(self._scalar("Q")), int(self._scalar("Q"))
        metadata: dict[str, MetadataValue] = {}
        for _ in range(pair_count):
            key = self._string("a metadata key")
            value = self._value(int(self._scalar("I")), key)
            if value is not None:
                metadata[key] = value
        if metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(f"{self._path}: is one part of a split GGUF; merge the parts first")
        headers = [self._tensor_header() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._offset // alignment) * alignment
        tensors = tuple(self._locate(start, *header) for header in headers)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise self._damaged("two tensors have the same name")
        return GgufFile(self._path, metadata, tensors, self._strings)

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: damaged or truncated: {what}")

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._data) - self._offset:
            raise self._damaged(f"{what} ends beyond the file")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), "the header"))
        return value

    def _string(self, what: str) -> str:
        return self._take(int(self._scalar("Q")), what).decode("utf-8", errors="replace")

    def _value(self, kind: int, key: str) -> MetadataValue | None:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"{key} has unknown type {kind}")

    def _array(self, key: str) -> tuple[int | float | bool, ...] | None:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if kind == _STRING:
            texts = self._texts(count, key)
            if key in self._wanted:
                self._strings[key] = tuple(text.decode("utf-8", errors="replace") for text in texts)
            else:
                deque(texts, maxlen=0)  # gone over, and not kept
            return None
        if kind not in _SCALARS:
            raise self._damaged(f"{key} is an array of unknown type {kind}")
        raw = self._take(count * struct.calcsize("<" + _SCALARS[kind]), key)
        return struct.unpack(f"<{count}{_SCALARS[kind]}", raw) if count <= _MAX_KEPT_ARRAY else None

    def _texts(self, count: int, what: str) -> Iterator[bytes]:
        """Go over strings that lie one behind the other: a vocabulary has some 100,000 of them."""
        data, size, length_at = self._data, len(self._data), struct.Struct("<Q").unpack_from
        offset = self._offset
        for _ in range(count):
            begin = offset + 8
            offset = begin + length_at(data, offset)[0] if begin <= size else begin
            if offset > size:
                raise self._damaged(f"{what} ends beyond the file")
            yield data[begin:offset]
        self._offset = offset

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        dimensions = int(self._scalar("I"))
        if dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(int(self._scalar("Q")) for _ in range(dimensions))
        return name, shape[::-1], int(self._scalar("I")), int(self._scalar("Q"))

    def _locate(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self._damaged(f"tensor {name} has unknown type {kind}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        elements = math.prod(shape)
        if not shape or shape[-1] % block_elements:
            raise self._damaged(f"tensor {name} of shape {shape} is not in whole {quantization.name} blocks")
        nbytes = elements // block_elements * block_bytes
        if start + offset + nbytes > len(self._data):
            raise self._damaged(f"tensor {name} ends beyond the file")
        return GgufTensor(name, shape, quantization.name, start + offset, nbytes)
