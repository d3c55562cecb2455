"""How a chain is cut, and what its seals depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from channel_peer import cargo_of

from kvhive.worker.transfer_cargo import SEAL_BYTES


@pytest.mark.parametrize(
    ("chunk_blocks", "chunks"),
    [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (100, [7])],
)
def test_every_block_is_in_one_chunk_in_order(chunk_blocks: int, chunks: list[int]) -> None:
    cargo = cargo_of([9, 8, 1, 2, 3, 0, 5], chunk_blocks)
    assert [len(chunk) for chunk in cargo.chunks] == chunks
    assert [block for chunk in cargo.chunks for block in cargo.blocks_of(chunk)] == list(cargo.blocks)


def test_a_seal_is_of_the_nonce_the_place_and_the_hashes_and_not_of_where_blocks_are() -> None:
    cargo = cargo_of([4, 5, 6, 7], 2)
    chunk = range(0, 2)
    seal = cargo.seal(chunk)
    assert len(seal) == SEAL_BYTES
    assert seal == replace(cargo, blocks=[1, 2, 3, 0]).seal(chunk)
    others = [
        replace(cargo, nonce=b"m" * 16).seal(chunk),
        replace(cargo, hashes=[*cargo.hashes[:1], *cargo.hashes[2:], cargo.hashes[1]]).seal(chunk),
        cargo.seal(range(2, 4)),
        replace(cargo, hashes=cargo.hashes[2:]).seal(chunk),  # the same ones in another place
    ]
    assert len({seal, *others}) == 5
