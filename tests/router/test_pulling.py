"""From a request to blocks that moved: the router names the source, the worker pulls, the usage says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_rig import running_router
from transfer_rig import TRANSFER, prompt_of

from kvhive.proto.errors import InvalidRequest
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.scripts.embedded_redis import EmbeddedRedis


async def test_a_busy_holder_s_prefix_is_pulled_and_the_usage_says_so(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, step_s=0.02, transfer=TRANSFER) as rig:
        prompt = prompt_of(1, 401)
        first = await rig.ask(prompt)
        await rig.indexed()
        rig.state.loads.reserve("busy", first.usage.worker_id, 100_000, rig.registry.clock())
        assert first.usage.pulled_tokens == 0
        second = await rig.ask([*prompt, 7])
        assert second.usage.worker_id != first.usage.worker_id
        assert (second.usage.cached_tokens, second.usage.pulled_tokens) == (0, 400)
        assert second.usage.reachable_tokens == 400
        assert second.token_ids == rig.oracle([*prompt, 7], 4)
        rig.state.loads.finish("busy", rig.registry.clock())
        await rig.idle()


async def test_prewarming_computes_once_and_copies_to_the_others(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=3, transfer=TRANSFER) as rig:
        prompt = prompt_of(2, 200)
        warmed = await rig.dispatcher.prewarm(GenerateRequest(TokenPrompt(tuple(prompt))), 3)
        assert {usage.worker_id for usage in warmed} == {"w1", "w2", "w3"}
        assert (warmed[0].pulled_tokens, warmed[0].written_tokens) == (0, 200)
        # The last of 50 full blocks is computed everywhere: its last token's logits are needed.
        assert [(u.cached_tokens, u.pulled_tokens, u.written_tokens) for u in warmed[1:]] == [(0, 196, 4)] * 2
        assert all(len(worker.pool._by_hash) == 50 for worker in rig.workers.values())
        again = await rig.dispatcher.prewarm(GenerateRequest(TokenPrompt(tuple(prompt))), 2)
        assert [(u.cached_tokens, u.written_tokens) for u in again] == [(196, 0)] * 2
        await rig.idle()


async def test_prewarming_more_workers_than_there_are_means_all_and_other_numbers_are_refused(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Without transfer each of them computes."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        request = GenerateRequest(TokenPrompt(tuple(prompt_of(3, 41))))
        warmed = await rig.dispatcher.prewarm(request, 10)
        assert [usage.written_tokens for usage in warmed] == [40, 40]
        for number in (0, 65):
            with pytest.raises(InvalidRequest, match=f"workers: must be between 1 and 64, is {number}"):
                await rig.dispatcher.prewarm(request, number)
        await rig.idle()
