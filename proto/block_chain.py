"""The hashes of a prompt's blocks, each under the one before: what hash_block says, all at once.

Computed in C++ where a compiler was found, through hashlib where not; the hashes are the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, cast

from kvhive.proto.block_hash import (
    BLOCK_KEY_BYTES,
    DIGEST_BYTES,
    HASH_VERSION,
    BlockHash,
    BlockKey,
    cut,
    field,
    hash_block,
    pack_tokens,
)
from kvhive.proto.native_chain import native_chain

_HEAD = hashlib.sha256(field(HASH_VERSION) + DIGEST_BYTES.to_bytes(4, "little"))
"""Every block's digest begins like this: the version, and the length of the parent's hash."""


class ChainHash(Protocol):
    """Hashes whole chains. From any thread."""

    name: str

    def digests(self, parent: bytes, packed: bytes, stride: int, extras: bytes) -> bytes | bytearray:
        """Return the hashes of the whole pieces of `stride` bytes, one after the other.

        The first piece is hashed under `parent` and with `extras`, each further one under the one before it.
        """
        ...


class HashlibChain:
    """Implements ChainHash by OpenSSL's hash, a block at a time."""

    name = "hashlib"

    def digests(self, parent: bytes, packed: bytes, stride: int, extras: bytes) -> bytes:
        """See ChainHash.

        It is what hash_block does, with what all blocks have in common done once and the rest laid out for
        few steps of the interpreter: a third of the time that took.
        """
        blocks = iter(cut(packed, f"{stride}s", stride))
        chain: list[bytes] = [hash_block(BlockHash(parent), first, extras) for first in islice(blocks, 1)]
        begin, before, after, append = _HEAD.copy, stride.to_bytes(4, "little"), field(b""), chain.append
        for tokens in blocks:
            digest = begin()
            digest.update(chain[-1] + before + tokens + after)
            append(digest.digest())
        return b"".join(chain)


@functools.cache
def chain_hash() -> ChainHash:
    """Return who hashes in this process. The first call may build a library: call it before one serves."""
    return native_chain() or HashlibChain()


def extend_chain(
    chain: list[BlockHash], root: BlockHash, tokens: Sequence[int], block_size: int, extras: bytes = b""
) -> None:
    """Append to `chain` the hashes of all full blocks of `tokens` that it does not have yet.

    `chain` must hold the hashes of a prefix of `tokens`; `extras` enter the first block only.
    """
    full_blocks = len(tokens) // block_size
    start = len(chain)
    if start >= full_blocks:
        return
    packed = pack_tokens(tokens[start * block_size : full_blocks * block_size])
    parent, extras = (chain[-1], b"") if chain else (root, extras)
    if full_blocks - start == 1:  # as in every decode
        chain.append(hash_block(parent, packed, extras))
    else:
        chain += _hashes(chain_hash().digests(parent, packed, 4 * block_size, extras))


def hash_chain(
    root: BlockHash, tokens: Sequence[int], block_size: int, extras: bytes = b""
) -> list[BlockHash]:
    """Return the hashes of all full blocks of `tokens`, first block first."""
    return _hashes(chain_hash().digests(root, pack_tokens(tokens), 4 * block_size, extras))


def chain_keys(root: BlockHash, packed: bytes, block_size: int, extras: bytes = b"") -> tuple[BlockKey, ...]:
    """Return the index keys of all full blocks of packed tokens, first block first."""
    digests = chain_hash().digests(root, packed, 4 * block_size, extras)
    piece = f"{BLOCK_KEY_BYTES}s{DIGEST_BYTES - BLOCK_KEY_BYTES}x"
    return cast("tuple[BlockKey, ...]", cut(digests, piece, DIGEST_BYTES))


def _hashes(digests: bytes | bytearray) -> list[BlockHash]:
    return cast("list[BlockHash]", list(cut(digests, f"{DIGEST_BYTES}s", DIGEST_BYTES)))
