"""cache_key, a hint about home: steers what is cold or equal, yields to cost, never touches identity."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from http_door import say
from httpx import AsyncClient
from placing_rig import PlacedFleet, cold_prompt
from scripted_frontend import ScriptedFrontend

from kvhive.proto.block_hash import root_hash
from kvhive.router.prompt import PromptPreparer
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.routing_policy import RouteReason
from kvhive.router.tokenizer import TextTokenizer

KEYS = [f"session {i}" for i in range(60)]


def homes(fleet: PlacedFleet) -> dict[str, str]:
    return {key: fleet.placers[0].weigh(cold_prompt(10**6, key=key), 16).worker_id for key in KEYS}


def test_cold_requests_of_one_key_meet_at_one_home_however_different_they_are() -> None:
    fleet, counts = PlacedFleet(workers=8), Counter[str]()
    for i in range(40):
        placement = fleet.send(cold_prompt(i, key="k"))
        assert placement.decision.reason is RouteReason.HOME
        counts[placement.worker_id] += 1
        fleet.complete()
        fleet.report()
    assert len(counts) == 1
    assert len(set(homes(fleet).values())) == 8, "and keys spread"


def test_of_workers_that_hold_equally_much_the_home_is_chosen() -> None:
    fleet = PlacedFleet(workers=4)
    prompt = cold_prompt(1)
    for worker_id in ("w0", "w1", "w2", "w3"):
        fleet.mirror.replace(worker_id, prompt.keys)
    for key, home in homes(fleet).items():
        placement = fleet.placers[0].weigh(replace(prompt, home_key=key.encode(), keyed=True), 16)
        assert (placement.worker_id, placement.decision.reason) == (home, RouteReason.PREFIX)


def test_a_worker_that_leaves_moves_only_its_own_keys_and_gets_them_back() -> None:
    fleet = PlacedFleet(workers=3)
    before = homes(fleet)
    fleet.leave("w1")
    without = homes(fleet)
    assert {key for key in KEYS if without[key] != before[key]} == {k for k in KEYS if before[k] == "w1"}
    assert len({without[key] for key in KEYS if before[key] == "w1"}) == 2, "they spread over the others"
    fleet.join("w1")
    assert homes(fleet) == before


def test_a_worker_that_joins_takes_only_its_share() -> None:
    fleet = PlacedFleet(workers=3)
    before = homes(fleet)
    fleet.join("w3")
    moved = {key for key, home in homes(fleet).items() if home != before[key]}
    assert 0 < len(moved) < 30 and {homes(fleet)[key] for key in moved} == {"w3"}


def test_a_loaded_home_overflows_by_cost_and_gets_its_key_back() -> None:
    """Nothing is remembered of the overflow: a failed or finished one leaves no binding."""
    fleet = PlacedFleet(workers=4)
    home = homes(fleet)[KEYS[0]]
    went = [fleet.send(cold_prompt(i, 4000, key=KEYS[0])) for i in range(12)]
    assert went[0].worker_id == home
    assert {p.worker_id for p in went} == {"w0", "w1", "w2", "w3"}
    assert {p.decision.reason for p in went} == {RouteReason.HOME, RouteReason.LOAD}
    fleet.complete()
    fleet.report()
    assert homes(fleet)[KEYS[0]] == home


def test_a_key_goes_where_the_prefix_is_held_even_if_that_is_not_its_home() -> None:
    """It never splits a cache: what another key, or none, has computed is found."""
    fleet = PlacedFleet(workers=4)
    computed = fleet.send(cold_prompt(7, 2000)).worker_id
    fleet.complete()
    fleet.report()
    for key in KEYS:
        keyed = cold_prompt(7, 2000, key=key)
        assert fleet.placers[0].weigh(keyed, 16).worker_id == computed


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


async def test_a_key_is_no_part_of_a_blocks_identity_and_a_salt_is(tokenizer: TextTokenizer) -> None:
    """It never joins caches either: under one key two salts stay two caches with two homes."""
    with ThreadPoolExecutor(1) as executor:
        preparer = PromptPreparer(tokenizer, root_hash(b"model"), 4, executor)

        async def prepare(**fields: str) -> tuple[tuple[bytes, ...], bytes]:
            prompt = await preparer.prepare(GenerateRequest(TokenPrompt(tuple(range(40))), **fields))  # type: ignore[arg-type]
            return prompt.keys, prompt.home_key

        plain, keyed = await prepare(), await prepare(cache_key="k")
        assert plain[0] == keyed[0] and plain[1] != keyed[1]
        salted = [await prepare(cache_salt=salt, cache_key="k") for salt in ("a", "b")]
        assert len({plain[0], salted[0][0], salted[1][0]}) == 3
        assert len({keyed[1], salted[0][1], salted[1][1]}) == 3


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({"x-kvhive-cache-key": "from header"}, {}, "from header"),
        ({"X-Kvhive-Cache-Key": "from header"}, {"prompt_cache_key": "from body"}, "from body"),
        ({"x-kvhive-cache-key": "Zoë".encode()}, {}, "Zoë"),
        ({}, {"prompt_cache_key": "from body"}, "from body"),
        ({}, {}, ""),
    ],
)
async def test_over_http_a_key_comes_in_the_body_or_in_a_header(
    frontend: ScriptedFrontend,
    http: AsyncClient,
    headers: dict[str, str],
    body: dict[str, str],
    key: str,
) -> None:
    for path, prompt in (
        ("chat/completions", say("say x")),
        ("completions", {"model": "demo", "prompt": "say x"}),
    ):
        response = await http.post(f"/v1/{path}", json={**prompt, **body}, headers=headers)
        assert response.status_code == 200
        assert frontend.requests[-1].cache_key == key


@pytest.mark.parametrize(
    ("value", "words"),
    [(b"k" * 257, "must be at most 256 characters, is 257"), (b"\xff", "must be UTF-8, is '\\xff'")],
)
async def test_a_bad_header_is_refused_by_its_name(http: AsyncClient, value: bytes, words: str) -> None:
    response = await http.post(
        "/v1/chat/completions", json=say("say x"), headers={"x-kvhive-cache-key": value}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "x-kvhive-cache-key" and words in error["message"]
