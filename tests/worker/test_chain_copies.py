"""Chains that are copied for their own sake: handed over, fetched and listed, between whole workers."""

from __future__ import annotations

import grpc
import pytest
from transfer_rig import ask, at_rest, pair, prompt_of, source_of, until
from worker_rig import METADATA, ROOT

from kvhive.proto.block_chain import hash_chain
from kvhive.proto.block_hash import namespace_extras
from kvhive.proto.v1 import worker_pb2


async def test_an_adapter_s_blocks_are_not_the_base_model_s() -> None:
    """Faults 12 and 20: the adapter is in every hash that is asked for, and no salt is like it."""
    async with pair() as (a, b):
        prompt = prompt_of(5, 41)
        await ask(a, "base", prompt)
        await ask(a, "salt", prompt, cache_salt="acme")
        spaces = [
            namespace_extras(adapter=b"acme"),
            namespace_extras("acme", b"acme"),
            namespace_extras("acme"),
        ]
        chains = [
            worker_pb2.Chain(hashes=b"".join(hash_chain(ROOT, prompt, 4, space))) for space in [*spaces, b""]
        ]
        target = worker_pb2.BlockSource(worker_id="b", address=b.address, epoch=1)
        request = worker_pb2.CopyChainsRequest(worker_id="a", target=target, chains=chains)
        answers = {c.chain: (c.blocks, c.error) async for c in a.stub.CopyChains(request, metadata=METADATA)}
        assert answers == {0: (0, "short"), 1: (0, "short"), 2: (10, ""), 3: (10, "")}
        await until(lambda: a.engine.desk.sent_blocks == 20)
        await at_rest(a, b)


async def test_chains_are_fetched_and_handed_over_with_an_answer_for_each() -> None:
    async with pair() as (a, b):
        prompts = [prompt_of(20 + i, 41) for i in range(4)]
        for index, prompt in enumerate(prompts[:3]):
            await ask(a, f"r{index}", prompt)
        chains = [worker_pb2.Chain(hashes=b"".join(hash_chain(ROOT, prompt, 4))) for prompt in prompts]
        target = worker_pb2.BlockSource(worker_id="b", address=b.address, epoch=1)
        request = worker_pb2.CopyChainsRequest(worker_id="a", target=target, chains=chains)
        answers = {c.chain: c async for c in a.stub.CopyChains(request, metadata=METADATA)}
        assert [(answers[i].blocks, answers[i].error) for i in range(4)] == [
            (10, ""),
            (10, ""),
            (10, ""),
            (0, "short"),
        ]
        for index, prompt in enumerate(prompts[:3]):
            assert (await ask(b, f"r{index}", prompt)).cached_tokens == 40
        again = {c.chain: c.blocks async for c in a.stub.CopyChains(request, metadata=METADATA)}
        assert again == {0: 10, 1: 10, 2: 10, 3: 0}
        await at_rest(a, b)


async def test_what_is_listed_as_hot_can_be_handed_over_as_it_is() -> None:
    """Three conversations under one system prompt, at once: the part that all share travels once."""
    async with pair() as (a, b):
        system = prompt_of(30, 40)
        prompts = [[*system, *prompt_of(31 + i, 41)] for i in range(3)]
        for index, prompt in enumerate(prompts):
            await ask(a, f"r{index}", prompt)
        listing = worker_pb2.ListHotChainsRequest(worker_id="a", max_chains=8, max_blocks=100)
        hot = [chain async for chain in a.stub.ListHotChains(listing, metadata=METADATA)]
        assert [(len(c.chain.hashes) // 32, c.new_blocks, c.new_uses) for c in hot] == [
            (10, 10, 20),
            (21, 11, 0),
            (21, 11, 0),
            (21, 11, 0),
        ]
        target = worker_pb2.BlockSource(worker_id="b", address=b.address, epoch=1)
        # Not the shared part by itself, so that three pulls want it at once.
        request = worker_pb2.CopyChainsRequest(
            worker_id="a", target=target, chains=[chain.chain for chain in hot[1:]]
        )
        answers = {c.chain: c async for c in a.stub.CopyChains(request, metadata=METADATA)}
        assert [(answers[i].blocks, answers[i].error) for i in range(3)] == [(21, "")] * 3
        await until(lambda: a.engine.desk.sent_blocks == 10 + 3 * 11)
        for index, prompt in enumerate(prompts):
            assert (await ask(b, f"r{index}", prompt)).cached_tokens == 80
        await at_rest(a, b)


@pytest.mark.parametrize(("chains", "blocks", "field"), [(0, 1, "max_chains"), (1, 1 << 20, "max_blocks")])
async def test_a_list_without_bounds_is_refused(chains: int, blocks: int, field: str) -> None:
    async with pair() as (a, _):
        listing = worker_pb2.ListHotChainsRequest(worker_id="a", max_chains=chains, max_blocks=blocks)
        with pytest.raises(grpc.aio.AioRpcError, match=field) as error:
            async for _chain in a.stub.ListHotChains(listing, metadata=METADATA):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def pinned(**pin: object) -> list[worker_pb2.Chain]:
    fields = {"blocks": 1, "ttl_s": 1.0, **pin}
    return [worker_pb2.Chain(hashes=b"x" * 32, pin=worker_pb2.ChainPin(**fields))]


@pytest.mark.parametrize(
    "chains",
    [
        [],
        [worker_pb2.Chain(hashes=b"x" * 33)],
        [worker_pb2.Chain()],
        pinned(blocks=2),
        pinned(blocks=0),
        pinned(ttl_s=0.0),
        pinned(ttl_s=float("nan")),
        pinned(tenant="t" * 257),
    ],
)
async def test_chains_that_are_none_are_refused(chains: list[worker_pb2.Chain]) -> None:
    async with pair() as (a, _):
        request = worker_pb2.FetchChainsRequest(worker_id="a", source=source_of(a, 1), chains=chains)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _answer in a.stub.FetchChains(request, metadata=METADATA):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
