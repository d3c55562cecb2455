"""`kvhive generate` as a program reads it: one JSON object, whatever the usage has in it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import scripted_frontend
from grpc_door import grpc_door
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.router.frontend import KeptPrefix
from kvhive.scripts import completion


async def test_an_answer_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    request = completion.text_request("say a b", completion.SamplingFlags(max_tokens=5))
    async with grpc_door(ScriptedFrontend()) as (_, address):
        state: Any = SimpleNamespace(grpc=address, cluster_token="t")
        await asyncio.to_thread(completion.run, state, request, True)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["worker_id"]) == ("ab", "stop", "w1")
    assert set(answer["usage"]) == set(USAGE.__slots__)
    assert answer["usage"]["cached_tokens"] == USAGE.cached_tokens


async def test_what_became_of_pins_is_in_the_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = (KeptPrefix(16, 300.0, True), KeptPrefix(32, 3600.0, False, "over_budget"))
    monkeypatch.setattr(scripted_frontend, "USAGE", replace(USAGE, kept=prefixes, not_kept="over_budget"))
    request = completion.chat_request([("user", "a b")], completion.SamplingFlags(max_tokens=5))
    async with grpc_door(ScriptedFrontend()) as (_, address):
        state: Any = SimpleNamespace(grpc=address, cluster_token="t")
        await asyncio.to_thread(completion.run, state, request, True)
    usage = json.loads(capsys.readouterr().out)["usage"]
    assert usage["not_kept"] == "over_budget"
    assert usage["kept"] == [
        {"tokens": 16, "ttl_s": 300.0, "kept": True},
        {"tokens": 32, "ttl_s": 3600.0, "kept": False},
    ]
