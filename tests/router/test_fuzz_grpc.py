"""Made-up messages at the gRPC door of a router on simulated workers: every call ends, nothing is left."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from grpc_door import grpc_door
from open_doors import MODEL_VOCABULARY
from router_rig import RouterRig, running_router

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.fuzz_grpc import fuzz
from kvhive.scripts.fuzz_messages import random_call, random_message

CASES = int(os.environ.get("KVHIVE_FUZZ_CASES", "200"))
SEED = int(os.environ.get("KVHIVE_FUZZ_SEED", "1"))


def described(rig: RouterRig) -> pb.GetClusterResponse:
    """What a router says of its workers, here by their own word."""
    response = pb.GetClusterResponse()
    for worker_id, worker in rig.workers.items():
        load = worker.engine.load
        info = response.workers.add(id=worker_id, running=load.running, waiting=load.waiting)
        info.blocks.live, info.blocks.cached = load.blocks_live, load.blocks_cached
        info.blocks.free, info.blocks.total = load.blocks_free, load.blocks_total
    response.router.in_flight, response.router.held = rig.dispatcher.in_flight, rig.dispatcher.held
    response.audit.placed_requests = rig.state.loads.requests()
    return response


@pytest.mark.timeout(1200)
async def test_no_message_breaks_anything(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, vocab_size=MODEL_VOCABULARY) as rig:
        explain = rig.dispatcher.ledger.explain
        async with grpc_door(rig.dispatcher, lambda: described(rig), explain) as (_, address):
            outcome = await fuzz(address, CASES, SEED)
        assert not outcome.failures + outcome.left, "\n".join(outcome.failures + outcome.left)
        assert sum(outcome.statuses.values()) == CASES
        # It would show nothing if all were refused, or none.
        assert outcome.statuses["Generate OK"] > CASES / 20, outcome.statuses
        assert outcome.statuses["Generate INVALID_ARGUMENT"] > CASES / 20, outcome.statuses
        for worker in rig.workers.values():
            await worker.idle()
        print(dict(outcome.statuses), outcome.refused.most_common(40))


def test_a_case_is_made_again_by_its_number() -> None:
    descriptor = pb.GenerateRequest.DESCRIPTOR
    made = [random_call(descriptor, random.Random(f"1/{number}")) for number in range(50)]
    assert made == [random_call(descriptor, random.Random(f"1/{number}")) for number in range(50)]
    assert len(set(made)) > 40


def test_every_field_is_set_by_some_case() -> None:
    for name in ("GenerateRequest", "PrewarmRequest", "TokenizeRequest"):
        descriptor = pb.DESCRIPTOR.message_types_by_name[name]
        messages = [random_message(descriptor, random.Random(number)) for number in range(200)]
        set_fields = {field.name for message in messages for field, _ in message.ListFields()}
        assert set_fields == {field.name for field in descriptor.fields}
