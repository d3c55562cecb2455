"""What each step computes: one token budget, decodes first, FCFS, nothing lost in preemption."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig

from kvhive.proto.errors import InvalidRequest, Overloaded
from kvhive.worker.scheduler import MAX_PREEMPTIONS
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


@pytest.mark.parametrize("budget", [2, 8])
def test_a_decoding_neighbour_waits_for_one_step_of_the_budget_and_no_more(budget: int) -> None:
    """Whatever else arrives: long prompts, urgent ones, other tenants, drafts, more than can run at once."""
    rig = Rig(blocks=400, budget=budget, drafts=3)
    rig.submit("decoding", range(5), max_tokens=200)
    while not rig.tokens("decoding"):
        rig.run(steps=1)
    for i in range(30):
        rig.submit(f"long{i}", range(200 * i, 200 * i + 150), priority=i % 3, tenant=f"t{i % 4}")
        before = len(rig.tokens("decoding"))
        rig.run(steps=1)
        assert len(rig.tokens("decoding")) > before
        assert sum(len(chunk.token_ids) + chunk.max_drafts for chunk in rig.runner.asked) <= budget


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    """Else some of those that decode would have to sit out."""
    rig = Rig(blocks=64, budget=3, max_running=8)
    for i in range(8):
        rig.submit(f"r{i}", [i], max_tokens=20)
    rig.run(steps=12)
    assert len(rig.scheduler.running) == 3


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


def test_preemption_takes_the_lowest_priority_first() -> None:
    """Although it was admitted first, and is not who needs the block."""
    rig = Rig(blocks=7, budget=16)
    low = rig.submit("low", range(8), max_tokens=20, priority=-1)
    rig.run(steps=1)
    high = rig.submit("high", range(100, 108), max_tokens=20)
    rig.run(steps=8)
    assert (low.preemptions, high.preemptions) == (1, 0)
    rig.run()
    assert rig.tokens("low") == rig.expected("low", 20)


def test_nobody_is_preempted_more_than_three_times() -> None:
    """Low-priority work among a stream of urgent requests in a pool that is too small: it is let finish."""
    rig = Rig(blocks=12, budget=16, max_waiting=200)
    low = [rig.submit(f"low{i}", range(50 * i, 50 * i + 6), max_tokens=30, priority=-5) for i in range(3)]
    for i in range(60):
        rig.submit(f"high{i}", range(1000 + 9 * i, 1006 + 9 * i), max_tokens=10, priority=5)
        rig.run(steps=4)
    rig.run()
    assert 1 <= max(seq.preemptions for seq in rig.sequences.values()) <= MAX_PREEMPTIONS
    assert all(rig.tokens(f"low{i}") == rig.expected(f"low{i}", 30) for i, _ in enumerate(low))


def test_one_long_and_three_medium_requests_in_a_tight_pool_do_not_play_ping_pong() -> None:
    """Who comes back has room for its whole need, so each return gets it further; and all finish."""
    rig = Rig(blocks=12, budget=16)
    seqs = [rig.submit("long", range(8), max_tokens=36)]
    seqs += [rig.submit(f"m{i}", range(100 * i, 100 * i + 12), max_tokens=12) for i in range(1, 4)]
    rig.run(steps=60)
    assert rig.scheduler.idle
    assert all(seq.preemptions <= MAX_PREEMPTIONS for seq in seqs) and rig.scheduler.preemptions <= 3
    assert all(rig.tokens(f"m{i}") == rig.expected(f"m{i}", 12) for i in range(1, 4))


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


def test_a_cancelled_sequence_leaves_its_slot_and_its_blocks_to_the_next_step() -> None:
    """300 times at random moments: no slot stays occupied, and the batch is fully usable afterwards."""
    rig = Rig(blocks=64, budget=8, max_running=3, drafts=2)
    moments = random.Random(3)
    for i in range(300):
        rig.submit(f"r{i}", range(i, i + moments.randint(1, 20)), max_tokens=8, tenant=f"t{i % 3}")
        rig.run(steps=moments.randint(0, 3))
        rig.engine.cancel(f"r{max(0, i - moments.randint(0, 4))}")
        rig.engine.step()
        assert all(seq.request_id in rig.engine._sequences for seq in rig.scheduler.running)
    for i in range(300):
        rig.engine.cancel(f"r{i}")
    rig.engine.step()
    assert rig.scheduler.idle and rig.pool.usage().live == 0
    for i in range(3):
        rig.submit(f"after{i}", [i], max_tokens=50)
    rig.run(steps=2)
    assert len(rig.scheduler.running) == 3
    rig.run()


def test_min_tokens_holds_back_the_end() -> None:
    """A stop token that the model would choose at once is not chosen before min_tokens."""
    rig = Rig(blocks=64)
    rig.prompts["probe"] = [1, 2, 3]
    stop = rig.expected("probe", 1)
    seq = rig.submit("a", [1, 2, 3], max_tokens=10, stop=stop, min_tokens=6)
    rig.run()
    assert rig.tokens("a") == rig.expected("a", 10) and seq.finish_reason is FinishReason.LENGTH


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
