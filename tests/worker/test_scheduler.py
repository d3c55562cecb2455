"""What each step computes: one token budget, decodes first, FCFS, nothing lost in preemption."""

from __future__ import annotations

import pytest
from engine_rig import Rig

from kvhive.proto.errors import InvalidRequest, Overloaded
from kvhive.worker.sequence import FinishReason, SamplingParams, Sequence, SequenceState


def plan_of(rig: Rig) -> dict[str, int]:
    while rig.engine._inbox:
        rig.engine._inbox.popleft()()
    return {item.seq.request_id: item.num_tokens for item in rig.scheduler.schedule()}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """No output before the prompt is done, then exactly max_tokens."""
    rig = Rig(blocks=64, budget=8)
    rig.submit("a", range(30), max_tokens=5)
    rig.run(steps=3)
    assert rig.tokens("a") == []
    rig.run()
    assert rig.tokens("a") == rig.expected("a", 5)


def test_decodes_go_first_and_the_rest_of_the_budget_prefills() -> None:
    rig = Rig(blocks=64, budget=8)
    rig.submit("decoding", range(5), max_tokens=30)
    rig.run(steps=2)
    rig.submit("long", range(100, 140))
    assert plan_of(rig) == {"decoding": 1, "long": 7}


def test_a_long_prompt_never_skips_a_decoding_neighbour() -> None:
    rig = Rig(blocks=128, budget=8)
    rig.submit("decoding", range(5), max_tokens=20)
    rig.run(steps=1)
    rig.submit("long", range(200, 400))
    before = len(rig.tokens("decoding"))
    rig.run(steps=10)
    assert len(rig.tokens("decoding")) == before + 10


def test_prompts_are_admitted_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for blocks."""
    rig = Rig(blocks=8, budget=64)
    rig.submit("running", range(20), max_tokens=4)
    rig.run(steps=1)
    rig.submit("large", range(100, 120), max_tokens=4)
    rig.submit("small", [1], max_tokens=1)
    assert "small" not in plan_of(rig)
    rig.run()
    assert len(rig.tokens("small")) == 1


def test_preemption_loses_and_doubles_nothing() -> None:
    """The same tokens as alone, and few preemptions each."""
    rig = Rig(blocks=12, budget=16)
    seqs = [rig.submit(f"r{i}", range(100 * i, 100 * i + 9), max_tokens=30) for i in range(4)]
    rig.run()
    assert rig.scheduler.preemptions > 0, "the pool was meant to be too small for all at once"
    for i, seq in enumerate(seqs):
        assert rig.tokens(f"r{i}") == rig.expected(f"r{i}", 30)
        assert seq.prompt_tokens == 9 and seq.preemptions <= 3


def test_preemption_takes_the_latest_admitted() -> None:
    rig = Rig(blocks=7, budget=16)
    first = rig.submit("first", range(8), max_tokens=20)
    second = rig.submit("second", range(100, 108), max_tokens=20)
    rig.run(steps=8)
    assert (first.preemptions, second.preemptions) == (0, 1)
    rig.run()


def test_cached_tokens_of_a_preempted_request_are_not_counted_as_hits() -> None:
    """Only unique prompts, so every hit is 0 however often they come back."""
    rig = Rig(blocks=12, budget=16)
    for i in range(4):
        rig.submit(f"r{i}", range(100 * i, 100 * i + 9), max_tokens=30)
    rig.run()
    assert rig.scheduler.prefix_hits == 0
    assert rig.scheduler.prefix_queries == 4 * 9
    assert all(output.cached_tokens == 0 for outputs in rig.outputs.values() for output in outputs)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    rig = Rig(blocks=4)
    rig.submit("fits", range(10), max_tokens=6)
    rig.submit("never", range(10), max_tokens=7)
    rig.run()
    [refusal] = rig.outputs["never"]
    assert isinstance(refusal.error, InvalidRequest)
    assert "need 17 tokens of KV, the worker's pool holds 16" in str(refusal.error)
    assert len(rig.tokens("fits")) == 6


def test_a_full_queue_refuses_one_more() -> None:
    rig = Rig(blocks=64, max_running=1, max_waiting=2)
    for i in range(5):
        rig.submit(f"r{i}", [i], max_tokens=3)
    rig.run()
    refused = [i for i, outputs in rig.outputs.items() if isinstance(outputs[0].error, Overloaded)]
    assert refused == ["r3", "r4"], "one runs, two wait"


def test_a_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    rig = Rig(blocks=64)
    rig.prompts["probe"] = [1, 2, 3]
    third = rig.expected("probe", 3)[2]
    seq = rig.submit("a", [1, 2, 3], max_tokens=10, stop=[third])
    rig.run()
    assert rig.tokens("a") == rig.expected("a", 3)
    assert seq.finish_reason is FinishReason.STOP


def test_cancelling_frees_blocks_before_the_next_step_and_twice_is_harmless() -> None:
    """While waiting, while prefilling, while decoding, after the end, unknown."""
    rig = Rig(blocks=32, budget=8, max_running=2)
    rig.submit("decoding", range(5), max_tokens=50)
    rig.submit("prefilling", range(100, 130), max_tokens=5)
    rig.submit("waiting", range(200, 210), max_tokens=5)
    rig.run(steps=2)
    for request_id in ("decoding", "prefilling", "waiting", "decoding", "unknown"):
        rig.engine.cancel(request_id)
    rig.engine.step()
    assert rig.pool.usage().live == 0 and rig.scheduler.idle
    rig.engine.cancel("decoding")
    rig.engine.step()


def test_the_load_counts_what_is_still_to_be_computed() -> None:
    rig = Rig(blocks=64, budget=8, max_running=2)
    rig.submit("a", range(5), max_tokens=9)
    rig.submit("b", range(100, 120), max_tokens=9)
    rig.submit("c", range(200, 210), max_tokens=9)
    rig.run(steps=1)
    assert rig.engine.load.queued_prefill_tokens == 17 + 10  # 3 of b's 20 went with a's 5
    assert (rig.engine.load.running, rig.engine.load.waiting) == (2, 1)


def test_a_finished_sequence_is_left_alone() -> None:
    rig = Rig(blocks=8)
    seq = Sequence("x", [1], 1, SamplingParams(1))
    seq.state = SequenceState.FINISHED
    rig.scheduler.cancel(seq)
    assert seq.finish_reason is None


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_output_does_not_depend_on_the_budget(budget: int) -> None:
    rig = Rig(blocks=40, budget=budget)
    for i in range(4):
        rig.submit(f"r{i}", range(50 * i, 50 * i + 3 + 7 * i), max_tokens=6)
    rig.run()
    for i in range(4):
        assert rig.tokens(f"r{i}") == rig.expected(f"r{i}", 6)
