"""A worker process speculates as it was told, and reports what came of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from redis.asyncio import Redis

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.config import SpeculationConfig
from kvhive.proto.index_schema import IndexKeys, WorkerRecord
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer

REPETITIVE = [504, 2365, 282, 1297, 314, 338, 7, 28, 216, 33, 30] * 6


async def test_a_worker_told_to_look_back_drafts_and_says_how_many_were_right(
    demo_gguf: Path, redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    """Greedy on a repetitive prompt, from the gRPC request to the record in the index."""
    server = WorkerServer(
        WorkerOptions(
            worker_id="w1",
            cluster="drafts",
            model_path=str(demo_gguf),
            model_name="demo",
            redis_url=redis_server.url,
            cluster_token="t",
            pool_tokens=1024,
            max_context=512,
            max_step_tokens=128,
            heartbeat_s=0.1,
            speculation=SpeculationConfig("ngram", max_drafts=3),
        )
    )
    await asyncio.to_thread(server.start)
    try:
        sampling = worker_pb2.WorkerSampling(
            max_tokens=12, top_p=1, typical_p=1, repetition_penalty=1, speculate=True
        )
        request = worker_pb2.WorkerGenerateRequest(
            worker_id="w1", request_id="r", token_ids=pack_tokens(REPETITIVE), sampling=sampling, n=1
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            answers = [part async for part in stub.Generate(request, metadata=((CLUSTER_TOKEN_KEY, "t"),))]
        assert sum(len(update.token_ids) for part in answers for update in part.updates) == 12
        for _ in range(100):  # until the next heartbeat
            record = WorkerRecord.from_fields(await index_redis.hgetall(IndexKeys("drafts").worker("w1")))
            if record.load.drafted_tokens:
                break
            await asyncio.sleep(0.05)
        assert 0 < record.load.accepted_tokens <= record.load.drafted_tokens
    finally:
        await asyncio.to_thread(server.stop, 1.0)
