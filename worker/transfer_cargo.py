"""The blocks of one transfer, and how they are cut into chunks, each under a seal. Both sides cut alike.

A seal is a digest of the transfer's nonce, the chunk's place and the hashes of its blocks. It comes after the
blocks: what arrives under another seal than the expected one is somebody else's, and is never registered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvhive.proto.block_hash import BlockHash

SEAL_BYTES = 32


@dataclass(frozen=True, slots=True)
class Cargo:
    """What travels. Equal on both sides but for the block ids."""

    nonce: bytes
    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    """Where each hash's block is, or is to be, in this side's pool."""
    chunk_blocks: int

    @property
    def chunks(self) -> list[range]:
        """The places of each chunk's blocks, in order; only the last chunk may have fewer."""
        total = len(self.hashes)
        begins = range(0, total, self.chunk_blocks)
        return [range(begin, min(begin + self.chunk_blocks, total)) for begin in begins]

    def blocks_of(self, chunk: range) -> Sequence[int]:
        """Return a chunk's blocks in this side's pool."""
        return self.blocks[chunk.start : chunk.stop]

    def seal(self, chunk: range) -> bytes:
        """Return the SEAL_BYTES that come after a chunk."""
        hashes = self.hashes[chunk.start : chunk.stop]
        return hashlib.sha256(b"".join([self.nonce, chunk.start.to_bytes(8, "little"), *hashes])).digest()
