"""What tensors a model's files hold and where their bytes are, without loading any. No torch here."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.gguf_file import read_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
_ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as it is stored."""

    name: str
    kind: str
    """The format's own name of the dtype, such as `BF16` or `Q4_1`."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def tensor_manifest(path: Path) -> tuple[TensorEntry, ...]:
    """List the tensors of a Hugging Face directory or .gguf file, by name. Raises ModelError."""
    if path.is_dir():
        entries = [entry for file in safetensors_files(path) for entry in safetensors_entries(file)]
    else:
        entries = [
            TensorEntry(tensor.name, tensor.kind, tensor.shape, path, tensor.offset, tensor.nbytes)
            for tensor in read_gguf(path).tensors
        ]
    entries.sort(key=lambda entry: entry.name)
    for one, two in itertools.pairwise(entries):
        if one.name == two.name:
            raise ModelError(f"{one.file}: tensor {one.name} is also in {two.file}")
    return tuple(entries)


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """Return the one file, or the shards of the index. Raises ModelError; never falls back to pickle."""
    if (directory / SINGLE_FILE).is_file():
        return (directory / SINGLE_FILE,)
    index = directory / INDEX_FILE
    if not index.is_file():
        pickles = sorted(file.name for file in directory.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which can run code, and is never read" if pickles else ""
        raise ModelError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read as a safetensors index: {error!r}") from error
    for name in sorted(map(str, names)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: shard {name!r} is not the name of a safetensors file beside it")
        if not (directory / name).is_file():
            raise ModelError(f"{directory / name}: the index names this shard, but it is missing")
    return tuple(directory / name for name in sorted(names))


def safetensors_entries(file: Path) -> list[TensorEntry]:
    """Read one file's header. Raises ModelError when it is damaged or promises more than the file holds.

    Format: 8 bytes of header length, a JSON header, the tensors' bytes.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{file}: damaged or truncated: the header ends beyond the file")
            header = json.loads(stream.read(header_bytes))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: damaged: the header is no JSON object")
    header.pop("__metadata__", None)
    return [_entry(file, 8 + header_bytes, size, name, value) for name, value in header.items()]


def _entry(file: Path, start: int, size: int, name: str, value: dict[str, object]) -> TensorEntry:
    try:
        kind = str(value["dtype"])
        shape = tuple(int(length) for length in value["shape"])  # type: ignore[attr-defined]
        begin, end = (int(offset) for offset in value["data_offsets"])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: damaged: the header's entry of tensor {name} is malformed") from error
    if kind not in _ELEMENT_BYTES:
        raise ModelError(f"{file}: tensor {name} has dtype {kind}, which is not supported")
    if begin < 0 or end - begin != math.prod(shape) * _ELEMENT_BYTES[kind]:
        raise ModelError(f"{file}: damaged: tensor {name} of shape {shape} has {end - begin} bytes")
    if start + end > size:
        raise ModelError(f"{file}: damaged or truncated: tensor {name} ends beyond the file")
    return TensorEntry(name, kind, shape, file, start + begin, end - begin)
