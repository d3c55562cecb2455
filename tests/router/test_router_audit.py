"""What a router tells of itself to who checks that nothing is left behind."""

from __future__ import annotations

from hashlib import sha256

from index_rig import key

from kvhive.proto.block_hash import BlockHash, block_key, keys_digest
from kvhive.proto.kv_events import EventBatch
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker


def test_the_digest_of_a_set_is_that_of_its_keys_in_any_order() -> None:
    keys = [block_key(BlockHash(sha256(b"%d" % n).digest())) for n in range(100)]
    assert keys_digest(keys) == keys_digest(reversed(keys)) != keys_digest(keys[1:])
    assert keys_digest([]) == 0 and keys_digest(keys) < 2**64


def test_the_mirror_tells_what_it_has_of_one_worker() -> None:
    mirror = KvIndexMirror()
    mirror.replace("w1", [key(1), key(2), key(3)])
    mirror.replace("w2", [key(3)])
    mirror.apply("w1", EventBatch(stored=(key(4),)))
    assert sorted(mirror.held("w1")) == sorted(key(n) for n in (1, 2, 3, 4))
    assert mirror.held("w2") == [key(3)] and mirror.held("w3") == []


def test_requests_that_are_placed_are_counted_until_they_finish() -> None:
    loads = LoadTracker()
    loads.reserve("r1", "w1", 10, 0.0, [], 10)
    loads.reserve("r2", "w2", 10, 0.0, [], 10)
    assert loads.requests() == 2
    loads.finish("r1", 1.0)
    loads.finish("r1", 1.0)
    assert loads.requests() == 1
