"""Why a request went where it did is remembered for a while, and within bounds."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from open_doors import MODEL_VOCABULARY, open_doors
from worker_records import Clock

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.decision_ledger import MAX_CANDIDATES, MAX_EXPLAINED, DecisionLedger
from kvhive.router.placement import Placement
from kvhive.router.routing_policy import CandidateCost, Decision, RouteReason
from kvhive.scripts.embedded_redis import EmbeddedRedis


def placement(*worker_ids: str, chosen: str = "", excluded: int = 1) -> Placement:
    """A decision among workers, each cheaper than the one before it."""
    costs = [
        CandidateCost(worker_id, 2, 3, queue_s=100.0 - i, compute_s=1.0, price=2.0, decode_s=0.5)
        for i, worker_id in enumerate(worker_ids)
    ]
    chosen = chosen or worker_ids[0]
    decision = Decision(
        chosen, RouteReason.PREFIX, costs, {f"w{9 + i}": "it drains" for i in range(excluded)}
    )
    return Placement(chosen, "a:1", 7, decision, 2, 3, 48, predicted_ttft_s=0.25)


def test_a_decision_is_told_as_it_was_made() -> None:
    clock = Clock()
    ledger = DecisionLedger(16, clock)
    entry = ledger.note("r1", "", 100, placement("w1", "w2", "w3", chosen="w2"), 1)
    clock.now += 5.0
    (told,) = ledger.explain("r1").decisions
    assert (told.worker_id, told.reason, told.prompt_tokens, told.moves) == ("w2", "prefix", 100, 1)
    assert (told.age_s, told.reachable_tokens, told.predicted_ttft_s) == (5.0, 48, 0.25)
    assert dict(told.excluded) == {"w9": "it drains"}
    assert not told.HasField("cached_tokens")
    assert [c.worker_id for c in told.candidates] == ["w2", "w3", "w1"]
    assert told.candidates[0] == pb.RouteCandidate(
        worker_id="w2",
        matched_tokens=32,
        expected_tokens=48,
        cost_s=99.0 + 2.0 * 1.0 + 0.5,
        queue_s=99.0,
        price=2.0,
        compute_s=1.0,
        decode_s=0.5,
    )
    entry.cached_tokens = 0
    (told,) = ledger.explain("r1").decisions
    assert told.HasField("cached_tokens") and told.cached_tokens == 0


def test_ids_that_repeat_are_told_oldest_first_and_other_tenants_ids_not_at_all() -> None:
    ledger = DecisionLedger(16, Clock())
    for tenant, worker_id in (("a", "w1"), ("b", "w2"), ("a", "w3")):
        ledger.note("r", tenant, 1, placement(worker_id), 0)
    assert [d.worker_id for d in ledger.explain("r").decisions] == ["w1", "w2", "w3"]
    assert [d.worker_id for d in ledger.explain("r", "a").decisions] == ["w1", "w3"]
    assert not ledger.explain("r", "c").decisions and not ledger.explain("s").decisions


def test_the_oldest_are_forgotten_by_their_number_and_by_what_they_hold() -> None:
    ledger = DecisionLedger(16, Clock(), most=3, most_rows=12)
    for number in range(5):
        ledger.note(f"r{number}", "", 1, placement("w1"), 0)
    assert len(ledger) == 3 and not ledger.explain("r1").decisions and ledger.explain("r2").decisions
    ledger.note("wide", "", 1, placement(*"abcdefghi"), 0)
    assert len(ledger) == 2 and ledger.explain("r4").decisions
    ledger.note("wider", "", 1, placement(*(f"w{i}" for i in range(100))), 0)
    (told,) = ledger.explain("wider").decisions
    assert len(ledger) == 1 and len(told.candidates) == MAX_CANDIDATES


def test_workers_that_were_none_take_room_too() -> None:
    ledger = DecisionLedger(16, Clock(), most_rows=10)
    for number in range(4):
        ledger.note(f"r{number}", "", 1, placement("w1", excluded=4), 0)
    assert len(ledger) == 2 and not ledger.explain("r1").decisions
    ledger.note("last", "", 1, placement("w1", excluded=9), 0)
    assert len(ledger) == 1


def test_an_answer_is_small_however_often_an_id_was_used_and_however_many_workers_there_are() -> None:
    ledger = DecisionLedger(16, Clock())
    wide = placement(*(f"w{i}" for i in range(500)), excluded=500)
    for number in range(MAX_EXPLAINED + 5):
        ledger.note("same", "", number, wide, 0)
    answer = ledger.explain("same")
    assert [told.prompt_tokens for told in answer.decisions] == list(range(5, MAX_EXPLAINED + 5))
    assert {len(told.excluded) for told in answer.decisions} == {MAX_CANDIDATES}
    assert answer.ByteSize() < 2**20


async def test_explain_tells_of_a_request_that_was_served(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        ids = pb.TokenIds(ids=range(MODEL_VOCABULARY - 40, MODEL_VOCABULARY))
        usages = []
        for request_id in ("first", "second"):
            request = pb.GenerateRequest(
                token_ids=ids, request_id=request_id, sampling=pb.SamplingParams(max_tokens=2)
            )
            responses = [response async for response in doors.grpc.Generate(request)]
            usages.append(responses[-1].finished.usage)
            await doors.rig.indexed()
        for request_id, usage in zip(("first", "second"), usages, strict=True):
            (told,) = (await doors.grpc.Explain(pb.ExplainRequest(request_id=request_id))).decisions
            assert (told.worker_id, told.reason) == (usage.worker_id, usage.route_reason)
            assert (told.prompt_tokens, told.cached_tokens) == (40, usage.cached_tokens)
            assert told.reachable_tokens == usage.reachable_tokens
            assert {candidate.worker_id for candidate in told.candidates} == {"w1", "w2"}
        assert (told.reason, told.cached_tokens) == ("prefix", 36)
        assert told.candidates[0].matched_tokens == 40
        with pytest.raises(grpc.aio.AioRpcError, match="third"):
            await doors.grpc.Explain(pb.ExplainRequest(request_id="third"))
