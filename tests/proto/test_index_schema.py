"""Names and records of the index."""

from __future__ import annotations

import pytest

from kvhive.proto.index_schema import (
    IndexKeys,
    LoadReport,
    WorkerRecord,
    WorkerState,
    parse_stream_id,
    stream_id,
)
from kvhive.proto.kv_events import EventBatch, RemovalCause, unpack_keys

RECORD = WorkerRecord(
    worker_id="w1",
    address="127.0.0.1:1",
    epoch=7,
    model="m",
    model_identity="ab",
    block_size=16,
    max_context=8192,
    vocab_size=100,
    state=WorkerState.SERVING,
    device="cpu",
    pid=1,
    load=LoadReport(running=2, step_base_s=0.25),
)


def wire(record: WorkerRecord) -> dict[bytes, bytes]:
    return {k.encode(): v.encode() for k, v in record.to_fields().items()}


def test_keys_of_a_worker_share_one_hash_tag() -> None:
    keys = IndexKeys("prod")
    assert keys.workers == "kvhive:prod:workers"
    assert keys.worker("w1") == "kvhive:prod:worker:{w1}"
    assert keys.blocks("w1", 7) == "kvhive:prod:blocks:{w1}:7"
    assert keys.events("w1", 7) == "kvhive:prod:events:{w1}:7"


def test_a_record_survives_the_round_trip() -> None:
    assert WorkerRecord.from_fields(wire(RECORD)) == RECORD


def test_unknown_fields_and_loads_of_a_newer_worker_are_ignored() -> None:
    fields = wire(RECORD) | {b"colour": b"red", b"load": b'{"running": 3, "mood": 1, "waiting": "x"}'}
    assert WorkerRecord.from_fields(fields).load == LoadReport(running=3)


@pytest.mark.parametrize(
    "damage",
    [
        {b"epoch": b"x"},
        {b"state": b"happy"},
        {b"load": b"[1]"},
        {b"load": b"{"},
        {b"address": b"\xff"},
        {b"pid": b""},
    ],
)
def test_a_damaged_record_is_an_error_and_nothing_else(damage: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError):
        WorkerRecord.from_fields(wire(RECORD) | damage)
    with pytest.raises(ValueError):
        WorkerRecord.from_fields({})


def test_stream_ids() -> None:
    assert stream_id(7, 3) == "7-3"
    assert parse_stream_id(b"7-3") == (7, 3)


def test_packed_keys_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        unpack_keys(b"x" * 15)


def test_a_batch_counts_what_it_changes() -> None:
    key = unpack_keys(b"k" * 16)
    batch = EventBatch(stored=key, removed={RemovalCause.EVICTED: key * 2})
    assert len(batch) == 3 and list(batch.removed_keys()) == [*key, *key]
