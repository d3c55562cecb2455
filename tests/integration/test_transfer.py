"""Blocks move between the workers of a real cluster, and answers are those of computing."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from inference import Client, by_tokens

from kvhive.proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = [1000 + 17 * i for i in range(401)]


async def test_prewarming_copies_and_what_was_copied_answers_as_what_is_computed(cluster: Any) -> None:
    salt = secrets.token_hex(4)
    async with Client(cluster.grpc) as client:
        before = await client.until(lambda c: sum(w.routable for w in c.workers) == 2, 60.0, "two workers")
        asked = pb.PrewarmRequest(token_ids=pb.TokenIds(ids=PROMPT), cache_salt=salt, workers=2)
        warmed = await client.stub.Prewarm(asked)
        first, second = warmed.workers
        assert {first.worker_id, second.worker_id} == {worker.id for worker in before.workers}
        assert (warmed.prompt_tokens, first.written_tokens, first.pulled_tokens) == (401, 400, 0)
        assert (second.cached_tokens, second.pulled_tokens, second.written_tokens) == (0, 400, 0)

        cold = await client.generate(by_tokens(PROMPT, 12, cache_salt=secrets.token_hex(4)))
        assert cold.cached == 0
        served: set[str] = set()
        for tail in range(40):
            warm = await client.generate(by_tokens(PROMPT, 12, cache_salt=salt, cache_key=str(tail)))
            assert warm.token_ids == cold.token_ids and warm.cached == 400
            served.add(warm.worker_id)
            if second.worker_id in served:
                break
        pulled = next(w for w in (await client.cluster()).workers if w.id == second.worker_id)
        assert pulled.pulled_tokens >= 400 and pulled.pulls >= 1
        await client.until(lambda c: all(not w.blocks.live for w in c.workers), 10.0, "at rest")


def test_the_command_says_what_it_took_at_each_worker(cluster: Any) -> None:
    prompt, salt = "A long prompt about lighthouses. " * 20, secrets.token_hex(4)
    options = ("--workers", "2", "--cache-salt", salt)
    document = json.loads(cluster.kvhive("prewarm", "--json", *options, prompt).stdout)
    assert sorted(w["worker_id"] for w in document["workers"]) == ["w1", "w2"]
    assert document["workers"][1]["pulled_tokens"] > 0
    again = cluster.kvhive("prewarm", *options, prompt).stdout
    assert again.count("pulled 0, computed 0") == 2
    assert cluster.kvhive("prewarm", "--ttl", "5", *options, prompt).stdout.count("kept for 5 s") == 2
    refused = cluster.kvhive("prewarm", "--workers", "65", "x", check=False)
    assert refused.returncode == 1
    assert "workers: must be between 1 and 64, is 65" in refused.stderr
    status = json.loads(cluster.kvhive("status", "--json").stdout)
    assert sum(worker["pulled_tokens"] for worker in status["workers"]) > 0
