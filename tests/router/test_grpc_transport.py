"""gRPC's own limits, as docs/grpc.md has them: large messages, silent streams and pings, cancelled calls."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from grpc_door import grpc_door
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis_fixtures import eventually
from scripted_frontend import ScriptedFrontend

from kvhive.proto.config import RouterConfig
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc

MIB = 1 << 20
LIMIT = RouterConfig().max_request_bytes
EAGER_PINGS = [
    ("grpc.keepalive_time_ms", 200),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


async def collected(stub: inference_pb2_grpc.InferenceStub, text: str) -> str:
    """Generate, and return the text that came."""
    responses = [response async for response in stub.Generate(pb.GenerateRequest(text=text))]
    assert responses[-1].HasField("finished")
    return "".join(response.delta.text for response in responses)


async def test_large_prompts_pass_up_to_the_limit_and_the_channel_outlives_larger_ones(
    frontend: ScriptedFrontend,
) -> None:
    """3.9 and 4.1 MB are on either side of the default that clients and servers of gRPC have."""
    async with grpc_door(frontend) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for size in (int(3.9 * MIB), int(4.1 * MIB), LIMIT - 1024):
            assert await collected(stub, f"say a {' ' * size}") == "a"
        other = stub.Generate(pb.GenerateRequest(text="hang a"))
        await other.read()
        for size in (LIMIT + 1, 20 * MIB):
            with pytest.raises(grpc.aio.AioRpcError, match=rf"\d+ vs\. {LIMIT}") as error:
                await collected(stub, " " * size)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await collected(stub, "say b") == "b"
        assert not other.done()
        other.cancel()
        await frontend.until_idle()


async def test_a_silent_stream_and_an_idle_channel_may_be_pinged(frontend: ScriptedFrontend) -> None:
    """gRPC's servers end a connection that pings more often than every five minutes, unless they are told."""
    async with (
        grpc_door(frontend) as (_, address),
        grpc.aio.insecure_channel(address, EAGER_PINGS) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="hang"))
        assert (await call.read()).HasField("started")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call.read(), 3.0)  # 15 pings
        states = [channel.get_state()]
        await asyncio.sleep(1.0)
        states.append(channel.get_state())
        assert states == [grpc.ChannelConnectivity.READY] * 2
        assert await collected(stub, "say a") == "a"


async def test_a_default_server_would_have_hung_up() -> None:
    """So that the test above can fail: the same pings at a server without our options."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", EAGER_PINGS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError, match=r"too_many_pings|ENHANCE_YOUR_CALM|Too many pings"):
            await asyncio.wait_for(watch.read(), 30.0)
    await server.stop(0)


class _Silent(health_pb2_grpc.HealthServicer):
    async def Watch(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()
        yield health_pb2.HealthCheckResponse()


async def test_health_is_watched_from_serving_to_not_serving_and_back(frontend: ScriptedFrontend) -> None:
    status = health_pb2.HealthCheckResponse
    async with grpc_door(frontend) as (doors, address), grpc.aio.insecure_channel(address) as channel:
        await doors.set_health(True)
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvhive.v1.Inference"):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            seen = [(await watch.read()).status]
            for serving in (False, True):
                await doors.set_health(serving)
                seen.append((await watch.read()).status)
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == seen[-1]
            assert seen == [status.SERVING, status.NOT_SERVING, status.SERVING]
            watch.cancel()


async def test_calls_that_are_cancelled_at_any_moment_leave_nothing(frontend: ScriptedFrontend) -> None:
    """Every task ends, and every client that waits gets a status."""
    chance = random.Random(5)
    async with grpc_door(frontend) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await collected(stub, "say a")
        before = len(asyncio.all_tasks())

        async def leave(verb: str, after_s: float) -> grpc.StatusCode:
            call = stub.Generate(pb.GenerateRequest(text=f"{verb} a b c"))
            await asyncio.sleep(after_s)
            call.cancel()
            return await asyncio.wait_for(call.code(), 30.0)

        streams = [leave(chance.choice(["hang", "flood"]), chance.uniform(0, 0.1)) for _ in range(100)]
        assert set(await asyncio.gather(*streams)) == {grpc.StatusCode.CANCELLED}
        await frontend.until_idle(30.0)
        await eventually(lambda: len(asyncio.all_tasks()) <= before, 30.0)
        assert await collected(stub, "say a") == "a"
