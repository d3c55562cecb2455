"""A worker process of a real model, told how to learn its tokens, writes what a schema asks for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
from redis.asyncio import Redis

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.router.tokenizer import TextTokenizer
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.worker_vocabulary import load_vocabulary
from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no", "日本"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


async def test_two_answers_are_of_the_schema(
    demo_gguf: Path, redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    server = WorkerServer(
        WorkerOptions(
            worker_id="w1",
            cluster="grammars",
            model_path=str(demo_gguf),
            model_name="demo",
            redis_url=redis_server.url,
            cluster_token="t",
            pool_tokens=1024,
            max_context=512,
            load_vocabulary=load_vocabulary,
        )
    )
    await asyncio.to_thread(server.start)
    try:
        tokenizer = TextTokenizer.load(demo_gguf)
        sampling = worker_pb2.WorkerSampling(
            max_tokens=80,
            temperature=1,
            top_p=1,
            typical_p=1,
            repetition_penalty=1,
            seed=3,
            stop_token_ids=tokenizer.eos_token_ids,
            grammar=worker_pb2.Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
        )
        prompt = pack_tokens(tokenizer.encode("Is the sky blue? Answer in JSON.\n", True))
        request = worker_pb2.WorkerGenerateRequest(
            worker_id="w1", request_id="r", token_ids=prompt, sampling=sampling, n=2
        )
        answers: dict[int, list[int]] = {0: [], 1: []}
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            async for part in stub.Generate(request, metadata=((CLUSTER_TOKEN_KEY, "t"),)):
                for update in part.updates:
                    answers[update.choice] += update.token_ids
                    assert update.finished.stopped or not update.HasField("finished")
        for tokens in answers.values():
            said = json.loads(tokenizer.decode(tokens))
            assert said["answer"] in ("yes", "no", "日本") and said["sure"] in (True, False)
    finally:
        await asyncio.to_thread(server.stop, 0.0)
