"""`kvhive explain` says in lines, or as JSON, what the router remembers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_door import grpc_door
from scripted_frontend import ScriptedFrontend

from kvhive.client import NotFound
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts import explain_command

DECISION = pb.RouteDecision(
    request_id="r1",
    age_s=2.0,
    worker_id="w2",
    reason="prefix",
    prompt_tokens=100,
    reachable_tokens=96,
    predicted_ttft_s=0.25,
    moves=1,
    candidates=[
        pb.RouteCandidate(worker_id="w2", matched_tokens=96, expected_tokens=96, cost_s=0.1, price=1.5),
        pb.RouteCandidate(worker_id="w1", cost_s=0.3, price=1.0),
    ],
    excluded={"w3": "it drains"},
)


async def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    def explain(request_id: str, tenant: str | None) -> pb.ExplainResponse:
        return pb.ExplainResponse(decisions=[DECISION] if request_id == "r1" else [])

    async with grpc_door(ScriptedFrontend(), explain=explain) as (_, address):
        state: Any = SimpleNamespace(grpc=address, cluster_token="t")
        await asyncio.to_thread(explain_command.run, state, "r1", False)
        first, second, _, chosen, other, out = capsys.readouterr().out.splitlines()
        assert first == "r1, 2.0 s ago: to w2 (prefix, after 1 others)"
        assert "prompt 100 tokens, 96 reachable, not begun" in second and "250 ms" in second
        assert chosen.split()[:4] == ["w2", "96", "96", "100.0"] and other.split()[0] == "w1"
        assert out == "  w3: it drains"
        await asyncio.to_thread(explain_command.run, state, "r1", True)
        (decision,) = json.loads(capsys.readouterr().out)["decisions"]
        assert decision["worker_id"] == "w2" and decision["candidates"][1]["matched_tokens"] == 0
        with pytest.raises(NotFound, match="'other'"):
            await asyncio.to_thread(explain_command.run, state, "other", False)


def test_a_worker_that_found_nothing_has_begun_all_the_same() -> None:
    decision = pb.RouteDecision()
    decision.CopyFrom(DECISION)
    decision.cached_tokens = 0
    assert "0 cached" in explain_command.lines(decision)[1]
