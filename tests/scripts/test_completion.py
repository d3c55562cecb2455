"""`kvhive generate` as a program reads it: one JSON object, whatever the usage has in it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_door import grpc_door
from scripted_frontend import USAGE, ScriptedFrontend

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
