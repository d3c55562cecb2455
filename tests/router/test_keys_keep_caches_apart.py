"""What one key's requests leave behind tells another key's nothing, unless they share a namespace."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from router_rig import RouterRig, running_router
from scripted_frontend import ScriptedFrontend

from kvhive.router.auth.cluster_secret import Namespaces
from kvhive.router.auth.keyed_frontend import KeyedFrontend
from kvhive.router.auth.principal import Principal, asking
from kvhive.router.frontend import Finished, Usage
from kvhive.router.request import GenerateRequest, Prompt, TextPrompt, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis

ALICE, BOB, CAROL = Principal("alice"), Principal("bob", "team"), Principal("carol", "team")
SECRET = tuple(range(100, 164))
LENGTH = len(SECRET) - 4
"""Of full blocks before the last token, which is always computed."""


def request(prompt: tuple[int, ...] = SECRET, **fields: str) -> GenerateRequest:
    return GenerateRequest(TokenPrompt(prompt), SamplingParams(max_tokens=2, ignore_eos=True), **fields)  # type: ignore[arg-type]


async def ask(frontend: KeyedFrontend, principal: Principal, asked: GenerateRequest) -> Usage:
    """Ask as the guard lets a principal do."""
    asking.set(principal)
    async with aclosing(frontend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Finished) and event.usage is not None:
                return event.usage
    raise AssertionError("no end")


async def would_go_to(rig: RouterRig, frontend: KeyedFrontend, who: Principal, asked: GenerateRequest) -> str:
    """Say where a request would be placed now; nothing is recorded."""
    asking.set(who)
    prepared = await rig.dispatcher._preparer.prepare(frontend._own(asked))
    return rig.dispatcher._placer.weigh(prepared, 2).worker_id


async def test_nobody_learns_of_a_prompt_by_guessing_it(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """Same prompt, same cache_key, same cache_salt or none: no hit, nothing reachable, and the same place as
    before the victim had ever asked. The victim still hits."""
    async with running_router(redis_server.url, demo_gguf, count=3) as rig:
        frontend = KeyedFrontend(rig.dispatcher, Namespaces("token"))
        victims = request(cache_salt="pepper", cache_key="session")
        guesses = [
            victims,
            request(cache_key="session"),
            request(cache_salt="pepper"),
            request(),
            *(replace(victims, cache_salt=f"{p.name}{p.namespace}") for p in (ALICE, BOB)),
            replace(victims, cache_salt=Namespaces("token").salt(ALICE, "pepper")),  # had it leaked
        ]
        before = [await would_go_to(rig, frontend, BOB, guess) for guess in guesses]
        home = (await ask(frontend, ALICE, victims)).worker_id
        # Blocks that are on their way count for their own, and not for others.
        assert await would_go_to(rig, frontend, ALICE, victims) == home
        assert [await would_go_to(rig, frontend, BOB, guess) for guess in guesses] == before
        await rig.indexed()
        await rig.idle()
        assert [await would_go_to(rig, frontend, BOB, guess) for guess in guesses] == before
        for guess in {guess.cache_salt: guess for guess in guesses}.values():  # later ones would hit his own
            usage = await ask(frontend, BOB, replace(guess, tenant="alice"))
            assert (usage.cached_tokens, usage.reachable_tokens) == (0, 0)
        again = await ask(frontend, ALICE, victims)
        assert (again.worker_id, again.cached_tokens) == (home, LENGTH)


async def test_what_two_namespaces_leave_has_no_block_in_common(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1) as rig:
        frontend = KeyedFrontend(rig.dispatcher, Namespaces("token"))
        first = await ask(frontend, ALICE, request())
        stranger = await ask(frontend, BOB, request())
        friend = await ask(frontend, CAROL, request())
        apart = await ask(frontend, CAROL, request(cache_salt="mine"))
        assert [u.cached_tokens for u in (first, stranger, friend, apart)] == [0, 0, LENGTH, 0]
        assert [u.reachable_tokens for u in (first, stranger, apart)] == [0, 0, 0]
        await rig.indexed()
        assert rig.mirror.block_count("w1") == 3 * (len(SECRET) // 4)


async def test_what_a_key_prewarms_is_for_its_namespace(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1) as rig:
        frontend = KeyedFrontend(rig.dispatcher, Namespaces("token"))
        asking.set(BOB)
        assert (await frontend.prewarm(request(), 1))[0].cached_tokens == 0
        cached = [(await ask(frontend, who, request())).cached_tokens for who in (ALICE, BOB, CAROL)]
        assert cached == [0, LENGTH, LENGTH]


async def test_a_restarted_router_of_the_same_cluster_finds_what_its_keys_have_cached(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1) as rig:
        await ask(KeyedFrontend(rig.dispatcher, Namespaces("token")), ALICE, request())
        for token, cached in (("token", LENGTH), ("another cluster's", 0)):
            frontend = KeyedFrontend(rig.dispatcher, Namespaces(token))
            assert (await ask(frontend, ALICE, request())).cached_tokens == cached


async def test_two_keys_at_once_stay_themselves(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """Requests that run side by side each keep the name they came with."""
    async with running_router(redis_server.url, demo_gguf, count=1, step_s=0.005) as rig:
        frontend = KeyedFrontend(rig.dispatcher, Namespaces("token"))
        crowd = [Principal(f"k{i % 4}") for i in range(12)]
        usages = await asyncio.gather(*(asyncio.create_task(ask(frontend, who, request())) for who in crowd))
        await rig.idle()
        await rig.indexed()
        assert len(usages) == 12 and rig.mirror.block_count("w1") == 4 * (len(SECRET) // 4)


async def test_tokenising_is_under_the_salt_of_its_key() -> None:
    """As generating is: so a conversation has as many tokens as are counted of it."""

    class Heard(ScriptedFrontend):
        salts: tuple[str, ...] = ()

        async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
            self.salts += (cache_salt,)
            return [1]

    inner, namespaces = Heard(), Namespaces("token")
    frontend = KeyedFrontend(inner, namespaces)
    for who, salt in ((ALICE, ""), (ALICE, "pepper"), (BOB, "")):
        asking.set(who)
        await frontend.tokenize(TextPrompt("a"), cache_salt=salt)
        assert inner.salts[-1] == namespaces.salt(who, salt)
