"""kvhive's side of `kvhive bench routing`: the mirror, the placer and the reader that a router runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import cast

from kvhive.proto.block_chain import chain_keys
from kvhive.proto.block_hash import BlockKey, pack_tokens, root_hash
from kvhive.proto.index_schema import KEYS_PER_BATCH, LoadReport, WorkerRecord, WorkerState
from kvhive.proto.kv_events import EventBatch, pack_keys
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import parse_batch
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import Placer, RoutingState
from kvhive.router.policies import make_policy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import PreparedPrompt
from kvhive.router.worker_registry import WorkerRegistry, WorkerView
from kvhive.scripts.bench_routing_work import (
    BLOCKS_PER_EVENT,
    IndexWork,
    key_number,
    new_number,
    prompt_tokens,
)

BLOCK_SIZE = 16
ROOT = root_hash(b"bench")


class StillFleet:
    """Stands for a WorkerRegistry whose workers are all there, idle and measured."""

    def __init__(self, workers: int) -> None:
        load = LoadReport(
            blocks_total=65_536,
            blocks_free=65_536,
            step_base_s=0.005,
            step_per_token_s=0.0001,
            step_per_attention_s=1e-9,
            max_step_tokens=2048,
        )
        now = time.monotonic()
        self._views = [WorkerView(_record(number, load), now) for number in range(workers)]

    def routable(self, now: float) -> list[WorkerView]:
        """As WorkerRegistry's."""
        return self._views

    def serving(self) -> list[WorkerView]:
        """As WorkerRegistry's."""
        return self._views

    def excluded(self, now: float) -> dict[str, str]:
        """As WorkerRegistry's: nobody."""
        return {}

    def placed(self, worker_id: str) -> None:
        """As WorkerRegistry's: nothing to remember."""


class OurRouter:
    """A mirror filled with an index, and a placer over it."""

    def __init__(self, work: IndexWork) -> None:
        self.work = work
        self.mirror = KvIndexMirror()
        for chain, worker, length in work.holdings():
            keys = [_key(key_number(chain, i)) for i in range(length)]
            for at in range(0, length, KEYS_PER_BATCH):
                self.mirror.apply(_name(worker), _batch_of(keys[at : at + KEYS_PER_BATCH]))
        self.mirror.touch(time.monotonic())
        fleet = cast(WorkerRegistry, StillFleet(work.workers))
        self._state = RoutingState(fleet, self.mirror, PredictedBlocks(30.0), LoadTracker())
        self._placer = Placer(self._state, make_policy("kv_aware", 0), BLOCK_SIZE, 1e9, time.monotonic)
        self._prompts = [
            [_key(key_number(chain, i) if i < known else new_number(n, i)) for i in range(work.prompt_blocks)]
            for n, (chain, known) in enumerate(work.prompts())
        ]

    def check(self) -> None:
        """Raise AssertionError when a match is not what the work says."""
        for keys, expected in zip(self._prompts, self.work.expected(), strict=True):
            assert self.mirror.match(keys) == {_name(worker): n for worker, n in expected.items()}

    def match_us(self) -> list[float]:
        """Microseconds of each prompt's match."""
        return [_timed(lambda keys=keys: self.mirror.match(keys)) for keys in self._prompts]  # type: ignore[misc]

    def place_us(self) -> list[float]:
        """Microseconds of each prompt's whole placement, index and reservation included."""
        times = []
        for number, keys in enumerate(self._prompts):
            prompt = _prepared([0] * (BLOCK_SIZE * len(keys)), tuple(keys), b"")
            times.append(_timed(lambda p=prompt, n=number: self._placer.place(f"r{n}", p, 16)))  # type: ignore[misc]
            self._state.loads.finish(f"r{number}", time.monotonic())
        for worker in range(self.work.workers):
            self._state.predicted.drop(_name(worker))
        return times

    def select_us(self, tokens: int, prompts: int) -> list[float]:
        """Microseconds from token ids to a decision, nothing reserved: hash, match, weigh."""
        times = []
        for number in range(prompts):
            ids = prompt_tokens(tokens, number)
            times.append(_timed(lambda ids=ids: self._placer.weigh(_hashed(ids), 16)))  # type: ignore[misc]
        return times


def apply_events_s(work: IndexWork) -> tuple[int, float]:
    """Apply an index's events of 16 blocks as they stand in streams; return blocks and seconds."""
    entries = []
    for chain, worker, length in work.holdings():
        keys = [_key(key_number(chain, i)) for i in range(length)]
        for at in range(0, length, BLOCKS_PER_EVENT):
            entries.append((_name(worker), {b"stored": pack_keys(keys[at : at + BLOCKS_PER_EVENT])}))
    mirror = KvIndexMirror()
    began = time.perf_counter()
    for worker_id, fields in entries:
        mirror.apply(worker_id, parse_batch(fields))
    seconds = time.perf_counter() - began
    return sum(len(fields[b"stored"]) // BLOCK_SIZE for _, fields in entries), seconds


def _batch_of(keys: list[BlockKey]) -> EventBatch:
    """A batch as it comes off the wire, where each key is an object of its own."""
    return parse_batch({b"stored": pack_keys(keys)})


def _hashed(ids: list[int]) -> PreparedPrompt:
    packed = pack_tokens(ids)
    return _prepared(ids, chain_keys(ROOT, packed, BLOCK_SIZE), packed)


def _prepared(ids: list[int], keys: tuple[BlockKey, ...], packed: bytes) -> PreparedPrompt:
    home = hashlib.blake2b(b"blocks" + keys[:8][-1]).digest()
    return PreparedPrompt(tuple(ids), packed, keys, home, keyed=False)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") * 2)


def _name(worker: int) -> str:
    return f"w{worker}"


def _record(number: int, load: LoadReport) -> WorkerRecord:
    return WorkerRecord(
        worker_id=_name(number),
        address=f"127.0.0.1:{1000 + number}",
        epoch=1,
        model="bench",
        model_identity="bench",
        block_size=BLOCK_SIZE,
        max_context=131_072,
        vocab_size=49_152,
        state=WorkerState.SERVING,
        device="none",
        pid=0,
        load=load,
    )
