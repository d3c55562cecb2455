"""A drain on real workers: what was hot there is hit elsewhere, and whatever hangs, it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from transfer_rig import TRANSFER, at_rest, prompt_of, until
from worker_records import record
from worker_rig import METADATA, TOKEN, WorkerRig, running_worker

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import LoadReport, WorkerRecord, WorkerState
from kvhive.proto.v1 import worker_pb2
from kvhive.scripts.drain import DrainMeans, DrainOrder, DrainProgress, drain
from kvhive.scripts.hand_over import HandOver, hand_over
from kvhive.scripts.worker_calls import WorkerCalls

SESSIONS = 12
SYSTEM = prompt_of(999, 16)


def session(number: int) -> list[int]:
    """What a conversation asks: what all begin with, and its own."""
    return SYSTEM + prompt_of(number, 24)


class BlindIndex:
    """Knows nothing: a hand-over must not need it."""

    async def held(self, worker: WorkerRecord, chains: Sequence[Sequence[BlockKey]]) -> set[BlockKey]:
        return set()


@dataclass
class Trio:
    """A worker that is to go, and two that stay."""

    victim: WorkerRig
    heirs: tuple[WorkerRig, WorkerRig]
    calls: WorkerCalls
    stopped: list[str] = field(default_factory=list)

    @property
    def means(self) -> DrainMeans:
        workers = {rig.worker_id: rig for rig in (self.victim, *self.heirs)}

        async def stop(worker_id: str) -> None:
            self.stopped.append(worker_id)

        def known(worker_id: str) -> WorkerRecord | None:
            return as_record(workers[worker_id]) if worker_id in workers else None

        return DrainMeans(self.calls, BlindIndex(), known, lambda: [as_record(h) for h in self.heirs], stop)

    async def cached(self, worker: WorkerRig, name: str, prompt: list[int]) -> int:
        """Ask for one token; return what of the prompt was cached."""
        (first, *_) = await worker.generate(worker.request(name, prompt, 1))
        return int(first.cached_tokens)


def as_record(rig: WorkerRig) -> WorkerRecord:
    load = LoadReport(
        blocks_total=256, blocks_free=rig.pool.usage().free, blocks_cached=rig.pool.usage().cached
    )
    return replace(record(rig.worker_id), address=rig.address, load=load)


@asynccontextmanager
async def trio(**options: object) -> AsyncIterator[Trio]:
    calls = WorkerCalls(TOKEN)
    async with (
        running_worker("w1", transfer=TRANSFER, **options) as victim,  # type: ignore[arg-type]
        running_worker("w2", transfer=TRANSFER) as left,
        running_worker("w3", transfer=TRANSFER) as right,
    ):
        try:
            yield Trio(victim, (left, right), calls)
        finally:
            await calls.retain(set())


@pytest.mark.parametrize("handing_over", [True, False])
async def test_survivors_keep_the_hot_hits_of_who_went_and_none_without_a_hand_over(
    handing_over: bool,
) -> None:
    async with trio() as three:
        for turn in range(2):
            hot = [await three.cached(three.victim, f"{turn}/{n}", session(n)) for n in range(SESSIONS)]
        progress = DrainProgress(DrainOrder("w1", 20.0, handing_over))
        await drain(progress.order, three.means, progress)
        assert progress.done and three.stopped == ["w1"] and not progress.note
        kept = 0
        for number in range(SESSIONS):
            heirs = list(three.heirs)
            random.Random(number).shuffle(heirs)
            found = [await three.cached(heir, f"again/{number}", session(number)) for heir in heirs]
            kept += max(found[0], found[1] if found[1] > len(SYSTEM) else 0)
        if handing_over:
            assert kept >= 0.8 * sum(hot)
            assert progress.handed.blocks_done == progress.handed.blocks > 0
        else:
            assert kept <= 0.5 * sum(hot), "only what all begin with, computed again by the first who asked"
        await at_rest(*three.heirs)


async def test_what_a_pin_kept_is_kept_by_the_heir_and_what_is_not_is_not() -> None:
    """Whose it is and for how long goes along; a worker that only shares what is hot keeps its pins alone."""
    async with trio() as three:
        pins = [worker_pb2.WorkerPin(tokens=16, ttl_s=900), worker_pb2.WorkerPin(tokens=32, ttl_s=300)]
        asked = three.victim.request("pinned", session(1), 1, pins=pins, tenant="t")
        (first, *_) = await three.victim.generate(asked)
        assert first.pinned_tokens == 32
        await three.cached(three.victim, "plain", session(2))
        sharing = HandOver()
        joined = as_record(three.heirs[1])
        await hand_over(as_record(three.victim), [joined], three.calls, BlindIndex(), sharing)
        assert sharing.blocks_done and not three.heirs[1].pool.leases.total
        order = DrainOrder("w1", 20.0)
        await drain(order, three.means, DrainProgress(order))
        await at_rest(*three.heirs)
        kept = {
            (block.lease.depth, block.lease.ttl_s, block.lease.tenant)
            for heir in three.heirs
            for block in heir.pool.blocks
            if block.lease
        }
        assert kept == {(depth, 900.0 if depth < 4 else 300.0, "t") for depth in range(8)}


async def test_a_draining_worker_takes_nothing_new_and_what_runs_goes_on() -> None:
    async with trio(step_s=0.01) as three:
        running = three.victim.stub.Generate(
            three.victim.request("runs", prompt_of(1, 8), 500), metadata=METADATA
        )
        await running.read()
        progress = DrainProgress(DrainOrder("w1", 60.0))
        draining = asyncio.create_task(drain(progress.order, three.means, progress))
        await until(lambda: three.victim.service.state is WorkerState.DRAINING)
        with pytest.raises(Exception, match="is draining"):
            await three.victim.generate(three.victim.request("new", prompt_of(2, 8)))
        assert not three.stopped
        for _ in range(5):
            assert len((await running.read()).updates) > 0, "it goes on"
        running.cancel()
        await draining
        assert three.stopped == ["w1"] and progress.moved_requests == 0


async def test_a_stream_that_never_ends_is_cut_off_at_the_bound() -> None:
    """Known fault 84: a drain has an end."""
    async with trio(step_s=0.01) as three:
        call = three.victim.stub.Generate(
            three.victim.request("endless", prompt_of(1, 8), 900), metadata=METADATA
        )
        await call.read()
        progress = DrainProgress(DrainOrder("w1", 1.0))
        await asyncio.wait_for(drain(progress.order, three.means, progress), 15.0)
        assert progress.done and progress.moved_requests == 1 and three.stopped == ["w1"]
        call.cancel()


class ForgetfulCalls(WorkerCalls):
    """Of every two answers about a drain, the second is lost."""

    asked = 0

    async def set_state(self, worker: WorkerRecord, state: WorkerState) -> int:
        self.asked += 1
        if self.asked % 2 == 0:
            raise Unavailable("DEADLINE_EXCEEDED")
        return await super().set_state(worker, state)


async def test_an_answer_that_does_not_come_cuts_off_no_stream() -> None:
    async with trio(step_s=0.01) as three:
        three.calls = ForgetfulCalls(TOKEN)
        running = asyncio.create_task(
            three.victim.generate(three.victim.request("runs", prompt_of(1, 8), 100))
        )
        await until(lambda: three.victim.service.open_streams > 0)
        progress = DrainProgress(DrainOrder("w1", 60.0))
        await drain(progress.order, three.means, progress)
        assert three.calls.asked > 2 and (progress.moved_requests, progress.note) == (0, "")
        assert len([t for r in await running for update in r.updates for t in update.token_ids]) == 100
        await three.calls.retain(set())


async def test_one_that_is_gone_while_it_drains_is_not_waited_for() -> None:
    async with trio(step_s=0.01) as three:
        call = three.victim.stub.Generate(
            three.victim.request("endless", prompt_of(1, 8), 900), metadata=METADATA
        )
        await call.read()
        progress = DrainProgress(DrainOrder("w1", 600.0, hand_over=False))
        means = three.means
        records = [means.record("w1"), None]
        lost = replace(means, calls=ForgetfulCalls(TOKEN), record=lambda worker_id: records.pop(0))
        await asyncio.wait_for(drain(progress.order, lost, progress), 30.0)
        assert progress.done and "DEADLINE_EXCEEDED" in progress.note and progress.moved_requests == 1
        await lost.calls.retain(set())
        call.cancel()


async def test_a_worker_that_is_unknown_or_silent_is_stopped_all_the_same() -> None:
    async with trio() as three:
        progress = DrainProgress(DrainOrder("w9", 5.0))
        await drain(progress.order, three.means, progress)
        assert progress.done and "not registered" in progress.note
        await three.victim.server.stop(0)
        progress = DrainProgress(DrainOrder("w1", 5.0))
        await drain(progress.order, three.means, progress)
        assert progress.done and "UNAVAILABLE" in progress.note
        assert three.stopped == ["w9", "w1"]


async def test_an_heir_that_has_died_costs_its_share_and_no_more() -> None:
    async with trio() as three:
        for number in range(SESSIONS):
            await three.cached(three.victim, f"a/{number}", session(number))
        left, right = three.heirs
        await right.server.stop(0)
        progress = HandOver()
        await hand_over(
            as_record(three.victim), [as_record(left), as_record(right)], three.calls, BlindIndex(), progress
        )
        assert 0 < progress.chains_done < progress.chains and progress.failed and "w3" in progress.error
        assert left.pool.usage().cached > 0


async def test_nobody_is_given_more_than_its_room() -> None:
    async with trio() as three:
        for number in range(SESSIONS):
            await three.cached(three.victim, f"a/{number}", session(number))
        small = replace(
            as_record(three.heirs[0]),
            load=LoadReport(blocks_total=256, blocks_free=20, blocks_cached=50, blocks_pinned=60),
        )
        progress = HandOver()
        await hand_over(as_record(three.victim), [small], three.calls, BlindIndex(), progress)
        assert 0 < three.heirs[0].pool.usage().cached <= 20
        full = replace(small, load=LoadReport(blocks_total=256))
        await hand_over(as_record(three.victim), [full], three.calls, BlindIndex(), progress)
        assert progress.error == "no survivor has room"


async def test_states_are_set_by_name_and_only_those_that_may_be() -> None:
    async with trio() as three:
        victim = as_record(three.victim)
        assert await three.calls.set_state(victim, WorkerState.DRAINING) == 0
        assert await three.calls.set_state(victim, WorkerState.SERVING) == 0
        assert len(await three.victim.generate(three.victim.request("a", prompt_of(3, 8)))) > 0
        for wrong in ("stopped", "warming", ""):
            request = worker_pb2.SetStateRequest(worker_id="w1", state=wrong)
            with pytest.raises(Exception, match=f"state: must be one of serving, draining, is '{wrong}'"):
                await three.victim.stub.SetState(request, metadata=METADATA)
        request = worker_pb2.SetStateRequest(worker_id="w2", state="serving")
        with pytest.raises(Exception, match="this is 'w1'"):
            await three.victim.stub.SetState(request, metadata=METADATA)
        await three.victim.service.close_doors()
        with pytest.raises(Exception, match="is stopping"):
            await three.victim.stub.SetState(
                worker_pb2.SetStateRequest(worker_id="w1", state="serving"), metadata=METADATA
            )
