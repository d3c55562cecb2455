"""The identity of a block is fixed for ever by golden vectors, and no two inputs share an encoding."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhive.proto.block_chain import extend_chain, hash_chain
from kvhive.proto.block_hash import (
    BlockHash,
    block_key,
    encode_extras,
    hash_block,
    namespace_extras,
    pack_tokens,
    root_hash,
    unpack_tokens,
)

MODEL = bytes(range(32))


def test_golden_vectors() -> None:
    """These values are stored in people's Redis: a change of any needs a new HASH_VERSION."""
    root = root_hash(MODEL)
    assert root.hex() == "b7e1e651ac49697b6ba8791e8af83a383fc565327369a8d7fbfef2dbdf0f0626"
    assert (
        root_hash(MODEL, b"pepper").hex()
        == "92e943f0805fc4dbc19d1943fc9a27d0f17ec0dcb53d34f8e48b57290d210c7b"
    )
    chain = hash_chain(root, range(32), 16)
    assert [h.hex() for h in chain] == [
        "5726a5e9c0529bef27e581c958d45ce2c646d0e3cef9cb8222d15399bfb7fd31",
        "7de305f74c891ebd1b86f2d8e33b00490c53d697c953b1e4c3ce9d825c456f1b",
    ]
    assert (
        hash_chain(root, range(16), 16, namespace_extras("tenant"))[0].hex()
        == "0128bcc2ac1ec4ee7ae385dc4f415100d119fbab52c17afe05d9af4efe2c8f24"
    )
    assert (
        hash_chain(root, range(16), 16, namespace_extras("", b"tenant"))[0].hex()
        == "6aa99e83abb9df26a232fd72258ea09aa602aee831c98c3d42cbfc893b30aa15"
    )


def test_a_hash_is_sha256_over_length_prefixed_parts() -> None:
    """The documented formula, spelt out by hand."""
    parent, tokens, extras = BlockHash(b"p" * 32), pack_tokens([1, 2]), b"x"
    spelt = b"".join(
        len(part).to_bytes(4, "little") + part for part in (b"kvhive-block-1", parent, tokens, extras)
    )
    assert hash_block(parent, tokens, extras) == hashlib.sha256(spelt).digest()
    assert tokens == b"\x01\0\0\0\x02\0\0\0"


def test_only_full_blocks_are_hashed() -> None:
    root = root_hash(MODEL)
    assert hash_chain(root, range(15), 16) == []
    assert len(hash_chain(root, range(33), 16)) == 2


def test_extending_a_chain_equals_hashing_it_at_once() -> None:
    root, extras = root_hash(MODEL), namespace_extras("s")
    chain: list[BlockHash] = []
    for end in (3, 16, 17, 40, 64, 64):
        extend_chain(chain, root, list(range(end)), 16, extras)
    assert chain == hash_chain(root, range(64), 16, extras)


def test_concatenated_namespace_parts_never_alias() -> None:
    """("ab", "c") is not ("a", "bc"); a salt is not an adapter; empty is the same as absent."""
    values = ["", "a", "ab", "abc", "b", "bc", "c", "org1", "2345", "org12345", "é", "e\u0301"]
    seen: dict[bytes, tuple[str, str]] = {}
    for salt, adapter in itertools.product(values, repeat=2):
        encoded = namespace_extras(salt, adapter.encode())
        assert seen.setdefault(encoded, (salt, adapter)) == (salt, adapter)
    assert namespace_extras("", b"") == b""


def test_model_cluster_salt_and_cache_salt_never_alias() -> None:
    """What one names as the other, or split elsewhere, is another block; the same three are the same."""
    values = ["", "a", "ab", "abc", "b", "bc", "c", "org1", "2345", "org12345", "é", "e\u0301", "\0", "a\0"]
    first_blocks = {
        hash_chain(root_hash(model.encode(), cluster.encode()), range(4), 4, namespace_extras(salt))[0]
        for model, cluster, salt in itertools.product(values, repeat=3)
    }
    assert len(first_blocks) == len(values) ** 3
    again = hash_chain(root_hash(b"org1", b"2345"), range(4), 4, namespace_extras("é"))[0]
    assert again in first_blocks


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tag 'tenant'"):
        encode_extras({"tenant": b"x"})


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_round_trips(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_a_token_outside_uint32_is_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_tokens([bad])


@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=12), st.lists(st.integers(0, 3), min_size=4, max_size=12)
)
def test_chains_agree_exactly_on_their_common_full_blocks(left: list[int], right: list[int]) -> None:
    root = root_hash(MODEL)
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    pairs = zip(hash_chain(root, left, 2), hash_chain(root, right, 2), strict=False)
    assert sum(a == b for a, b in pairs) == common // 2


def test_the_index_carries_the_first_16_bytes() -> None:
    block_hash = root_hash(MODEL)
    assert block_key(block_hash) == block_hash[:16]
