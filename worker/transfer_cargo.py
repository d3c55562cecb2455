"""The blocks of one transfer, and how they are cut: into chunks, each under a seal, and those into messages.

Both sides cut alike. Where blocks lie in a row, and such rows are long enough, a message is a row: on both
sides and it goes straight from pool to pool, on one and only the other one copies. Else a chunk is one
message, which is put together and taken apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvhive.proto.block_hash import BlockHash

STRAIGHT_BYTES = 256 * 1024
"""Messages of this many bytes on average are worth sending by themselves; smaller ones cost more than copying
their bytes twice does."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is begun and waited for at once: a chunk's messages or one of them."""

    chunk: range
    parts: list[range]
    """The places of each message's blocks."""

    @property
    def completes(self) -> bool:
        """Whether its chunk is complete with it: the seal comes after it."""
        return self.parts[-1].stop == self.chunk.stop


@dataclass(frozen=True, slots=True)
class Cargo:
    """What travels. Equal on both sides but for the block ids."""

    nonce: bytes
    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    """Where each hash's block is, or is to be, in this side's pool."""
    chunk_blocks: int
    messages: Sequence[int]
    """Blocks of each message, in order."""

    chunks: list[Parcel] = field(init=False)
    """Cut once, before anybody waits for it."""
    in_rows: bool = field(init=False)
    """Whether each message's blocks lie in a row in this side's pool."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", list(self._cut()))
        object.__setattr__(
            self, "in_rows", all(self.row(part) for each in self.chunks for part in each.parts)
        )

    def parcels(self, whole: bool) -> list[Parcel]:
        """Return each chunk as one parcel, or each message."""
        if whole:
            return self.chunks
        return [Parcel(each.chunk, [part]) for each in self.chunks for part in each.parts]

    def seal(self, chunk: range) -> bytes:
        """Return the digest that comes after a chunk: of the nonce, its place and its blocks' hashes."""
        hashes = self.hashes[chunk.start : chunk.stop]
        return hashlib.sha256(b"".join([self.nonce, chunk.start.to_bytes(8, "little"), *hashes])).digest()

    def row(self, part: range) -> bool:
        """Whether a message's blocks lie in a row in this side's pool."""
        blocks = self.blocks[part.start : part.stop]
        return list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))

    def _cut(self) -> Iterator[Parcel]:
        begin, total = 0, len(self.hashes)
        ends = iter(_ranges(self.messages))
        while begin < total:
            chunk = range(begin, min(begin + self.chunk_blocks, total))
            parts: list[range] = []
            while not parts or parts[-1].stop < chunk.stop:
                parts.append(next(ends))
            yield Parcel(chunk, parts)
            begin = chunk.stop


def runs(blocks: Sequence[int]) -> list[int]:
    """Return the lengths of the rows that some blocks lie in."""
    lengths: list[int] = []
    for index, block in enumerate(blocks):
        if index and block == blocks[index - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def cut(blocks: Sequence[int], others: Iterable[int], chunk_blocks: int, block_bytes: int) -> list[int]:
    """Return the messages of some blocks of this side, given the lengths of the other side's rows.

    A row of both sides each, if that makes messages that are long enough, or of the side that has fewer; or
    else a chunk each: smaller ones cost a busy machine more than is won by copying one while another is sent.
    """
    total = len(blocks)
    chunks = {*range(0, total, chunk_blocks), total}
    mine, theirs = _ends(runs(blocks), total), _ends(others, total)
    for rows in (mine | theirs, min(theirs, mine, key=len)):
        messages = _lengths(chunks | rows)
        if total * block_bytes >= STRAIGHT_BYTES * len(messages):
            return messages
    return _lengths(chunks)


def fits(messages: Sequence[int], blocks: int, chunk_blocks: int) -> bool:
    """Whether messages hold so many blocks, and none goes beyond its chunk."""
    parts = list(_ranges(messages))
    return (
        all(message > 0 for message in messages)
        and sum(messages) == blocks
        and all(part.start // chunk_blocks == (part.stop - 1) // chunk_blocks for part in parts)
    )


def _ends(lengths: Iterable[int], total: int) -> set[int]:
    return {part.stop for part in _ranges(lengths) if part.stop < total} | {total}


def _lengths(ends: set[int]) -> list[int]:
    return [after - before for before, after in pairwise(sorted(ends))]


def _ranges(lengths: Iterable[int]) -> Iterator[range]:
    begin = 0
    for length in lengths:
        yield range(begin, begin + length)
        begin += length
