"""A digest that says whether two workers' KV blocks are interchangeable. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DTYPES
from kvhive.worker.model_config import read_model_config
from kvhive.worker.tensor_manifest import TensorEntry, tensor_manifest

IDENTITY_VERSION = b"kvhive-model-1"
KV_LAYOUT_VERSION = b"blocks-layers-2-kv_heads-block_size-head_dim"
FULL_HASH_BYTES = 1 << 30
"""Models up to this size are hashed whole, in about a second; above it, samples are."""
SAMPLE_BYTES = 4096
_READ_BYTES = 1 << 20


def model_identity(
    path: Path,
    dtype: str,
    block_size: int,
    kv_dtype: str = "auto",
    full_hash_bytes: int = FULL_HASH_BYTES,
) -> bytes:
    """Return 32 bytes over the configuration, the tensors and the layout of KV in the pool.

    dtype: what the weights are loaded as, resolved (not `auto`).
    kv_dtype: what the KV is kept in: `auto` is dtype. Blocks of two formats are never interchangeable.

    The path, the file's name and the way tensors are split over shards do not matter. Up to
    `full_hash_bytes` of tensors every byte counts: equal identities mean equal weights. Above, each
    tensor's name, dtype, shape and its first, middle and last 4 KiB count. That tells apart any two trained
    or quantized models, because training moves every tensor everywhere; it does not see an edit of single
    values inside a tensor, and is no defence against somebody who makes one on purpose.

    Raises ModelError when the files cannot be read, ValueError for an unresolved dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, is {dtype!r}")
    config = dataclasses.asdict(read_model_config(path))
    entries = tensor_manifest(path)
    whole = sum(entry.nbytes for entry in entries) <= full_hash_bytes
    digest = hashlib.sha256()
    for part in (
        IDENTITY_VERSION,
        KV_LAYOUT_VERSION,
        dtype.encode(),
        kv_dtype.encode(),
        str(block_size).encode(),
        json.dumps(config, sort_keys=True, default=sorted).encode(),  # sets, sorted
        b"whole" if whole else b"sampled",
    ):
        _add(digest, part)
    for entry in entries:
        _add(digest, f"{entry.name}|{entry.kind}|{entry.shape}".encode())
        _add(digest, _content_digest(entry, whole))
    return digest.digest()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Prefix each part with its length, so that no two lists of parts are one string."""
    digest.update(len(part).to_bytes(8, "little") + part)


def _content_digest(entry: TensorEntry, whole: bool) -> bytes:
    content = hashlib.sha256()
    try:
        with entry.file.open("rb") as stream:
            for offset, size in _ranges(entry.nbytes, whole):
                stream.seek(entry.offset + offset)
                data = stream.read(size)
                if len(data) != size:
                    raise ModelError(f"{entry.file}: truncated: tensor {entry.name} ends beyond the file")
                content.update(data)
    except OSError as error:
        raise ModelError(f"{entry.file}: tensor {entry.name} cannot be read: {error}") from error
    return content.digest()


def _ranges(nbytes: int, whole: bool) -> list[tuple[int, int]]:
    """Return the (offset, size) of what is hashed of a tensor."""
    if whole or nbytes <= 3 * SAMPLE_BYTES:
        return [(offset, min(_READ_BYTES, nbytes - offset)) for offset in range(0, nbytes, _READ_BYTES)]
    return [(offset, SAMPLE_BYTES) for offset in (0, (nbytes - SAMPLE_BYTES) // 2, nbytes - SAMPLE_BYTES)]
