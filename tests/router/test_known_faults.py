"""Faults of routing and of its index that users of other systems reported in public, in the reports' numbers.

Those that other tests show with the same numbers are shown there: lost events and resyncs without end
(test_frozen_router.py, test_kv_index_failover.py), keys without expiry (test_kv_event_publisher.py), another
block size (test_worker_registry.py), ghosts (integration/test_faults.py), a failing worker that is chosen
again (test_failing_workers.py), sticky keys (test_cache_key.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

from placing_rig import BLOCK as PLACED_BLOCK
from placing_rig import IDLE, PlacedFleet, cold_prompt
from redis_fixtures import eventually, restart_full
from router_rig import BLOCK, RouterRig, running_router
from trace_files import turn, write_trace
from worker_records import record
from worker_rig import METADATA

from kvhive.proto.kv_events import EventBatch
from kvhive.proto.v1 import worker_pb2
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.kv_index_mirror import SWEEP_KEYS, KvIndexMirror
from kvhive.router.request import GenerateRequest
from kvhive.router.sampling_params import SamplingParams
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.sim_report import Goal, PolicyReport
from kvhive.scripts.simulate import lay_out, run_policy
from kvhive.scripts.trace_reader import read_trace
from kvhive.worker.sequence import SamplingParams as WorkerSampling
from kvhive.worker.sequence import Sequence


async def test_a_cleared_cache_is_gone_from_the_index_without_traffic(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Warm, cleared while idle, asked again: nothing is claimed, nothing is hit."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        prompt = list(range(40))
        warm = (await rig.ask(prompt)).usage.worker_id
        await rig.indexed()
        assert rig.mirror.block_count(warm) == 10
        await rig.workers[warm].idle()
        await rig.workers[warm].stub.ClearCache(worker_pb2.ClearCacheRequest(), metadata=METADATA)
        await eventually(lambda: rig.mirror.block_count(warm) == 0)
        again = await rig.ask(prompt)
        assert (again.usage.cached_tokens, again.usage.reachable_tokens) == (0, 0)


async def test_two_copies_told_twice_are_one_entry_until_the_last_one_goes(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Two equal prompts at once on one worker, of which one ends early; then the publisher connects anew. The
    index has the worker's own number throughout."""
    async with running_router(redis_server.url, demo_gguf, count=1, step_s=0.01) as rig:
        prompt = list(range(40))
        both = await asyncio.gather(rig.ask(prompt, 2), rig.ask(prompt, 40))
        assert {a.usage.cached_tokens for a in both} <= {0, 36}
        await rig.idle()
        await rig.indexed()
        held = rig.mirror.block_count("w1")
        assert held == len(rig.workers["w1"].pool._by_hash) >= 10
        publisher = rig.publishers["w1"]
        epoch = publisher.epoch
        await publisher._redis.flushall()  # whatever it has told, it tells again
        await eventually(lambda: publisher.epoch > epoch)
        await rig.indexed()
        assert rig.mirror.block_count("w1") == rig.mirror.total_blocks() == held
        assert (await rig.ask(prompt)).usage.cached_tokens == 36


def occupy(rig: RouterRig, worker_id: str, sequences: int, prompt_tokens: int = 1, tokens: int = 400) -> None:
    """Let a worker have so much to do, none of which came through this router."""
    for i in range(sequences):
        prompt = [(600 + 31 * i + j) % 900 for j in range(prompt_tokens)]
        rig.workers[worker_id].engine.submit(
            Sequence(f"{worker_id}/{i}", prompt, 1, WorkerSampling(max_tokens=tokens))
        )


async def test_another_salt_has_no_claim_on_what_one_salt_has_warmed(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """The same salt goes back and hits; another one scores nothing there, and goes to who has less to do."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.01, blocks=2048) as rig:
        prompt = list(range(64))
        warm = (await rig.ask(prompt, cache_salt="s1")).usage.worker_id
        await rig.indexed()
        same = await rig.ask(prompt, cache_salt="s1")
        assert (same.usage.worker_id, same.usage.cached_tokens) == (warm, 60)
        occupy(rig, warm, 16, prompt_tokens=100)
        await eventually(
            lambda: {v.record.worker_id: v.record.load.waiting > 0 for v in rig.registry.views()}[warm]
        )
        other = await rig.ask(prompt, cache_salt="s2")
        assert other.usage.worker_id != warm
        assert (other.usage.cached_tokens, other.usage.reachable_tokens) == (0, 0)


async def test_requests_go_on_while_redis_is_full(own_redis: EmbeddedRedis, demo_gguf: Path) -> None:
    """Under load, and with no room for a byte more: every request is answered. With 20 MB the index is true
    again."""
    async with running_router(own_redis.url, demo_gguf, blocks=4096) as rig:
        await rig.ask(list(range(40)))
        await asyncio.to_thread(restart_full, own_redis.url, -1)
        answers = [await rig.ask([(n * 7 + j) % 900 for j in range(100)]) for n in range(40)]
        assert all(len(a.token_ids) == 4 for a in answers)
        assert any(p.counters.retries for p in rig.publishers.values()), "it was full"
        await asyncio.to_thread(restart_full, own_redis.url, 20_000_000)
        await rig.indexed()


async def test_five_turns_of_a_chat_hit_all_that_their_tokens_have_in_common(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """An answer's text need not become the tokens again that it was made of. What is cached is the longest
    common prefix in full blocks, at every turn, however long that is."""
    async with running_router(redis_server.url, demo_gguf, count=1, blocks=2048, vocab_size=49152) as rig:
        messages = [ChatMessage("system", "You answer questions about a library.")]
        known: list[list[int]] = []
        for number in range(5):
            messages.append(
                ChatMessage("user", f"Question {number}: until when are you open on day {number}?")
            )
            prompt = ChatPrompt(tuple(messages))
            tokens = await rig.dispatcher.tokenize(prompt)
            sampling = SamplingParams(max_tokens=20, ignore_eos=True)
            answer = await rig.run(GenerateRequest(prompt, sampling))
            common = max((_common(tokens, each) for each in known), default=0)
            assert answer.usage.cached_tokens == min(common, len(tokens) - 1) // BLOCK * BLOCK
            assert number == 0 or answer.usage.cached_tokens > 8 * number
            known.append([*tokens, *answer.token_ids[:-1]])  # of the last token there is no KV
            messages.append(ChatMessage("assistant", answer.text))
            await rig.indexed()


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_fifty_thousand_prompts_fill_no_more_than_the_cap() -> None:
    """From a worker that never takes anything back. Prompts of eight blocks; the second half adds nothing,
    what was refused is counted, and when the worker has gone nothing is left."""
    cap = 10_000
    mirror = KvIndexMirror(max_keys_per_worker=cap)
    for half in (1, 2):
        for i in range(25_000):
            mirror.apply("w1", EventBatch(stored=cold_prompt(half * 25_000 + i, 8 * PLACED_BLOCK).keys))
        assert mirror.total_blocks() == mirror.distinct_blocks() == cap
        assert mirror.refused_keys == half * 200_000 - cap
    mirror.drop("w1")
    for _ in range(cap // SWEEP_KEYS + 1):
        mirror.sweep()
    assert mirror.distinct_blocks() == mirror.total_blocks() == 0


def test_new_prompts_go_to_the_idle_worker_however_much_it_caches() -> None:
    """W1 runs four long generations, W2 nothing, but it has a large warm cache: six new prompts go to W2."""
    fleet = PlacedFleet(workers=2)
    cpu = dataclasses.replace(IDLE, step_base_s=0.02, step_per_token_s=0.003)
    loads = {
        "w1": dataclasses.replace(cpu, running=4, blocks_live=400, blocks_free=65_136),
        "w2": dataclasses.replace(cpu, blocks_cached=60_000, blocks_free=5_536, victim_reuse=1.0),
    }
    fleet.views = [
        WorkerView(record(worker_id, load=load), fleet.clock()) for worker_id, load in loads.items()
    ]
    for i in range(1000):
        fleet.mirror.apply("w2", EventBatch(stored=cold_prompt(1000 + i, 960).keys))
    answers = [fleet.placers[0].weigh(cold_prompt(i, 100), 16).worker_id for i in range(6)]
    assert answers == ["w2"] * 6


def hot_prefix(path: Path, policy: str) -> PolicyReport:
    """Twenty clients with ten requests each, one after the other: eight hot blocks, then a question of its
    own."""
    rows = [
        turn(client, number, 8 * 16 + 8, [0, 8, 1000 + 10 * client + number, 1], think_s=0.0)
        for client in range(20)
        for number in range(10)
    ]
    study = lay_out(
        read_trace(write_trace(path / "hot.jsonl", rows, mode="closed")),
        SimulateOptions(
            workers=2,
            capacity_blocks=2000,
            load=20.0,
            cost=CostModel(prefill_tokens_per_s=300.0, step_base_s=0.02, max_running=4),
        ),
    )
    return run_policy(study, policy, Goal(), lambda subject, text: None)[0]


def test_a_hot_prefix_neither_queues_everybody_at_its_holder_nor_loses_its_cache(tmp_path: Path) -> None:
    """20 clients, 200 requests, two workers: each worker gets a quarter at least, four fifths are hits, and
    the slowest wait less than where affinity is all."""
    ours, affinity = (hot_prefix(tmp_path, policy) for policy in ("kv_aware", "longest_prefix"))
    assert ours.requests == 200
    assert ours.least_requests_share / 2 >= 0.25
    assert ours.token_hit_rate > 0.8
    assert ours.ttft_p90_s < affinity.ttft_p90_s and ours.ttft_p99_s < affinity.ttft_p99_s


def test_a_new_router_and_then_a_new_worker_start_no_more_blind_than_the_index() -> None:
    """Ten prefixes are warm on W1; the router is another one, W2 joins: old ones still hit W1, W2 gets its
    part of ten new ones."""
    fleet = PlacedFleet(workers=1, routers=2)
    old = [cold_prompt(i) for i in range(10)]
    for prompt in old:
        fleet.send(prompt, router=0)
        fleet.complete()
    fleet.join("w1")
    counts = Counter[str]()
    for i in range(10):
        placement = fleet.send(old[i], router=1)
        assert (placement.worker_id, placement.matched_blocks) == ("w0", len(old[i].keys))
        fleet.complete()
        counts[fleet.send(cold_prompt(100 + i), router=1).worker_id] += 1
        fleet.complete()
        fleet.clock.now += 1.0
        fleet.report()
    assert counts["w1"] >= 4


def test_any_router_may_die_and_the_others_agree_on_what_it_left() -> None:
    """Its reservations go with it; the workers' reports have its requests, which all others see alike."""
    fleet = PlacedFleet(workers=4, routers=10)
    home = fleet.send(cold_prompt(0, 40_000, key="k"), router=0).worker_id
    fleet.clock.now += 1.0
    fleet.report()
    for i in range(20):
        prompt = cold_prompt(1000 + i, 2000)
        answers = {placer.weigh(prompt, 16).worker_id for placer in fleet.placers[1:]}
        assert len(answers) == 1 and answers != {home}, "its queue is in the report"
        fleet.clock.now += 0.1
