"""The identity of a KV block: a chained SHA-256 that two workers and a router compute alike.

    hash_i = SHA-256( version | parent | tokens | extras )

Every part is prefixed by its length, so no two different inputs share an encoding ("ab"+"c" is not
"a"+"bc"). Only full blocks have a hash, and there is no fallback: a block that cannot be hashed is not
shared. The first block of a chain carries the request's namespace in its extras; chaining carries it on.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes. What a worker keeps and trusts."""

BlockKey = NewType("BlockKey", bytes)
"""The first 16 bytes of a BlockHash. What the index and the wire carry: advice, never proof."""

DIGEST_BYTES = 32
BLOCK_KEY_BYTES = 16
HASH_VERSION = b"kvhive-block-1"
_ROOT_VERSION = b"kvhive-root-1"
_DIGEST_BYTES = 8
EXTRA_TAGS = ("adapter", "media", "salt")
"""The kinds of extras, each with its own tag, so that a salt "x" and an adapter "x" never meet."""


def field(value: bytes) -> bytes:
    """Return a part as messages have it: its length, then itself."""
    return len(value).to_bytes(4, "little") + value


_CUT_AT_ONCE = 64


def root_hash(model_identity: bytes, cluster_salt: bytes = b"") -> BlockHash:
    """Return the parent of every first block of one model in one cluster.

    `model_identity` is a digest of the weights, the config and the KV layout (never the model's name).
    """
    digest = hashlib.sha256(field(_ROOT_VERSION) + field(model_identity) + field(cluster_salt))
    return BlockHash(digest.digest())


def encode_extras(extras: Mapping[str, bytes]) -> bytes:
    """Encode tagged extras in one canonical order; empty values are the same as absent ones.

    Raises ValueError for a tag that is not one of EXTRA_TAGS.
    """
    unknown = set(extras) - set(EXTRA_TAGS)
    if unknown:
        raise ValueError(f"extras: unknown tag {min(unknown)!r}, known tags are {EXTRA_TAGS}")
    return b"".join(field(tag.encode()) + field(extras[tag]) for tag in EXTRA_TAGS if extras.get(tag))


def namespace_extras(salt: str = "", adapter: bytes = b"") -> bytes:
    """Encode a request's namespace: the caller's cache salt and the digest of the adapter's content."""
    return encode_extras({"salt": salt.encode(), "adapter": adapter})


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack token ids as little-endian uint32. Raises OverflowError for ids outside uint32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Undo pack_tokens. Raises ValueError when the length is not a multiple of 4."""
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def hash_block(parent: BlockHash, packed_tokens: bytes, extras: bytes = b"") -> BlockHash:
    """Hash one full block of packed token ids under its parent."""
    message = field(HASH_VERSION) + field(parent) + field(packed_tokens) + field(extras)
    return BlockHash(hashlib.sha256(message).digest())


def cut(packed: bytes | bytearray, piece: str, size: int) -> tuple[bytes, ...]:
    """Return what struct's format `piece`, of `size` bytes and one value, finds in each whole piece.

    Many at a time, which takes a quarter of what slicing does.
    """
    whole = len(packed) // size
    if whole <= _CUT_AT_ONCE:
        return _pieces(piece, whole).unpack_from(packed)
    left = whole % _CUT_AT_ONCE
    most = _pieces(piece, _CUT_AT_ONCE).iter_unpack(memoryview(packed)[: (whole - left) * size])
    rest = _pieces(piece, left).unpack_from(packed, (whole - left) * size)
    return (*itertools.chain.from_iterable(most), *rest)


@functools.lru_cache(maxsize=4 * _CUT_AT_ONCE)  # all that keys, hashes and tokens are cut by
def _pieces(piece: str, count: int) -> struct.Struct:
    return struct.Struct(piece * count)


def block_key(block_hash: BlockHash) -> BlockKey:
    """Return the index key of a block hash."""
    return BlockKey(block_hash[:BLOCK_KEY_BYTES])


def keys_digest(keys: Iterable[BlockKey]) -> int:
    """Return 64 bits that are the same for the same keys in any order: to compare sets that are far apart.

    Keys are hashes already, so their exclusive or is as good as any.
    """
    digest = 0
    for key in keys:
        digest ^= int.from_bytes(key[:_DIGEST_BYTES], "little")
    return digest
