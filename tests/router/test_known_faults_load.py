"""Faults of cancelling, of health and of metrics that users of other systems reported in public.

Those that other tests show are shown there: pulls that are cancelled, late or broken (test_kv_transfer.py,
test_moving_accounting.py), cached tokens of a prompt that came from a peer (test_pulling.py), a frozen worker
(integration/test_faults.py), streams closed at any moment (test_dispatcher.py).
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_rig import Rig
from open_doors import OpenDoors, open_doors
from redis_fixtures import eventually
from router_rig import running_router
from session_rig import session
from worker_rig import METADATA, running_worker

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import worker_pb2
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


async def test_three_hundred_cancels_leave_no_place_taken(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """After 0 to 50 ms each, twenty at a time: before, while and after a worker takes them in. Every place is
    free again, and the same twenty fit."""
    async with running_router(
        redis_server.url, demo_gguf, step_s=0.002, blocks=4096, max_concurrent=20
    ) as rig:
        chance, room = random.Random(78), asyncio.Semaphore(20)

        async def cancelled(number: int) -> None:
            async with room:
                request = GenerateRequest(TokenPrompt((number, 1, 2)), LONG)
                task = asyncio.create_task(rig.run(request))
                await asyncio.sleep(chance.uniform(0.0, 0.05))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*map(cancelled, range(300)))
        assert rig.dispatcher.in_flight == 0 and not rig.state.loads._reservations
        for worker in rig.workers.values():
            await worker.idle(within_s=20.0)
            assert worker.engine.load.running == 0 and worker.thread.is_alive()
        answers = await asyncio.gather(*(rig.ask([n, 3, 4], 20) for n in range(20)))
        assert all(len(answer.token_ids) == 20 for answer in answers)


async def test_ending_what_has_ended_or_never_was_or_is_anothers_disturbs_nobody() -> None:
    """Twice, after the end, a made-up id, another router's: none of them is heard of again."""
    async with running_worker(step_s=0.005) as rig, session(rig) as ours, session(rig) as theirs:
        ours.say(start=[rig.request("ours", [1, 2], 60)])
        await ours.read()
        for cancels in (["ours", "made-up"], ["ours"]):
            theirs.say(cancel=cancels)
        for request_id in ("made-up", "ours"):
            stop = worker_pb2.StopChoicesRequest(request_id=request_id, choices=[7])
            await rig.stub.StopChoices(stop, metadata=METADATA)
        tokens: list[int] = []
        while True:
            message = await ours.read()
            assert message is not None
            tokens += [t for news in message.news for u in news.response.updates for t in u.token_ids]
            if any(news.HasField("end") for news in message.news):
                assert message.news[-1].end.status == "OK"
                break
        assert len(tokens) >= 50 and tokens == rig.oracle([1, 2], 60)[-len(tokens) :]
        for _ in range(2):
            ours.say(cancel=["ours"])
            stop = worker_pb2.StopChoicesRequest(request_id="ours", choices=[0])
            await rig.stub.StopChoices(stop, metadata=METADATA)
        ours.say(start=[rig.request("next", [3], 2)])
        last = await ours.read()
        assert last is not None and last.news[0].request_id == "next"
        ours.call.cancel()
        theirs.call.cancel()
        await rig.idle()


def sample(doors: OpenDoors, name: str, **labels: str) -> float:
    """The value of one of the router's metrics; 0 for one that was never counted."""
    return doors.registry.get_sample_value(name, labels) or 0.0


async def stream(doors: OpenDoors, number: int, length: int = 900) -> None:
    sampling = pb.SamplingParams(max_tokens=length, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[number, 5, 6]), sampling=sampling)
    async for _ in doors.grpc.Generate(request):
        pass


async def test_busy_is_not_unhealthy(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """Thirty-two long answers where sixteen can run: alive and ready at every probe, no worker lost."""
    async with open_doors(redis_server.url, demo_gguf, blocks=8192) as doors:
        for worker in doors.rig.workers.values():
            worker.runner._on_step = _slow
        busy = [asyncio.create_task(stream(doors, number)) for number in range(32)]
        await eventually(lambda: sum(w.engine.load.waiting for w in doors.rig.workers.values()) >= 8)
        url = str(doors.openai.base_url).removesuffix("/v1/")
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for _ in range(20):
                alive, ready = await http.get("/healthz"), await http.get("/readyz")
                assert (alive.status_code, ready.status_code) == (200, 200)
                await asyncio.sleep(0.05)
        assert doors.rig.registry.counters.leases_ended == 0
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        assert sample(doors, "kvhive_requests_failed_total", error="Unavailable") == 0


def _slow(tokens: int, pairs: int) -> None:
    import time

    time.sleep(0.01)


@pytest.mark.parametrize("after", ["an answer", "a disconnect"])
async def test_gauges_come_back_to_nothing(redis_server: EmbeddedRedis, demo_gguf: Path, after: str) -> None:
    """Fifty unique prompts answered, or twenty that had queued and whose clients left: nothing live, nothing
    waiting, much cached."""
    async with open_doors(redis_server.url, demo_gguf, step_s=0.002, blocks=512, count=1) as doors:
        load: Any = lambda: doors.rig.workers["w1"].engine.load  # noqa: E731
        if after == "an answer":
            await asyncio.gather(*(stream(doors, number, 8) for number in range(50)))
        else:
            queued = [asyncio.create_task(stream(doors, number)) for number in range(20)]
            await eventually(lambda: load().waiting >= 12)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
        await eventually(lambda: doors.rig.dispatcher.in_flight == 0)
        await doors.rig.workers["w1"].idle(within_s=20.0)
        report = load()
        assert (report.blocks_live, report.waiting, report.running) == (0, 0, 0)
        assert report.queued_prefill_tokens == report.accounting_errors == 0
        assert report.blocks_cached > 0
        assert report.blocks_cached + report.blocks_free == report.blocks_total
        assert report.blocks_cached == len(doors.rig.workers["w1"].pool._by_hash)
        assert not doors.rig.state.loads._reservations


def test_hits_are_counted_once_whatever_is_preempted() -> None:
    """Twenty unique prompts in a pool that has room for two or three: preempted, and no hit. Then ten of them
    again: as many hits as their answers say were cached."""
    rig = Rig(blocks=26, max_running=4)
    prompts = [[number * 37 % 900, number, *range(26)] for number in range(20)]
    for number, prompt in enumerate(prompts):
        rig.submit(f"new{number}", prompt, 16)
    rig.run()
    load = rig.engine.load
    assert load.preemptions > 0
    assert (load.prefix_queries, load.prefix_hits) == (sum(map(len, prompts)), 0)
    cached = 0
    for number in (19, 18, 19, 17, 18, 19, 16, 17, 18, 19):
        rig.submit(f"again{number}-{cached}-{rig.engine.steps}", prompts[number], 2)
        rig.run()
        cached += rig.cached([*rig.outputs][-1])
    report = rig.engine.load
    assert cached > 0 and report.prefix_hits == cached
    assert report.prefix_queries == sum(map(len, prompts)) + 10 * len(prompts[0])
