"""n answers to one prompt: computed once, shared without copies, and each a sequence of its own."""

from __future__ import annotations

import pytest
from engine_rig import Rig

from kvhive.proto.errors import ComputeError, InvalidRequest
from kvhive.worker.sequence import FinishReason, SequenceState


def test_choices_wait_for_the_prompt_and_compute_only_its_last_partial_block() -> None:
    """The full blocks are the same ones; a prompt of 18 tokens leaves 2 to each of the others."""
    rig = Rig(blocks=64, budget=8)
    first, *others = rig.choices("r", range(18), n=3, max_tokens=10)
    rig.run(steps=2)
    assert first.num_computed == 16 and all(seq.state is SequenceState.WAITING for seq in others)
    rig.run(steps=2)
    assert [seq.num_computed for seq in others] == [18, 18]
    assert len({tuple(seq.block_table[:4]) for seq in (first, *others)}) == 1
    assert rig.pool.blocks[first.block_table[0]].ref_count == 3
    rig.run()
    outputs = [rig.tokens(f"r/{i}") for i in range(3)]
    assert outputs == [rig.expected(f"r/{i}", 10) for i in range(3)] and len(set(map(tuple, outputs))) == 3


def test_only_the_first_choice_reports_what_was_cached_and_written() -> None:
    rig = Rig(blocks=64)
    for request_id, cached, written in (("a", 0, 16), ("b", 16, 0)):
        rig.choices(request_id, range(18), n=3)
        rig.run()
        told = [rig.outputs[f"{request_id}/{i}"][0] for i in range(3)]
        assert [output.cached_tokens for output in told] == [cached, 0, 0]
        assert [output.written_tokens for output in told] == [written, 0, 0]
    assert (rig.scheduler.prefix_queries, rig.scheduler.prefix_hits) == (36, 16)


def test_a_held_choice_blocks_nobody() -> None:
    rig = Rig(blocks=64, budget=8)
    rig.choices("r", range(40), n=2)
    rig.submit("other", [1, 2], max_tokens=1)
    rig.run(steps=6)
    assert rig.tokens("other") != []
    rig.run()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_leader_is_cancelled_the_next_choice_leads(steps: int) -> None:
    """Before it starts and half-way through its prompt; the others share what the new leader computes."""
    rig = Rig(blocks=64, budget=8)
    rig.choices("r", range(30), n=3, max_tokens=5)
    rig.run(steps=steps)
    rig.engine.cancel("r/0")
    rig.run(steps=2)
    assert len(rig.scheduler.running) == 1, "the third waits for the second"
    rig.run()
    assert rig.tokens("r/0") == []
    assert [rig.tokens(f"r/{i}") for i in (1, 2)] == [rig.expected(f"r/{i}", 5) for i in (1, 2)]


def test_when_the_leader_is_preempted_the_others_still_come() -> None:
    rig = Rig(blocks=14, budget=4)
    rig.submit("old", range(500, 508), max_tokens=40, priority=1)
    rig.run(steps=3)
    leader, *_ = rig.choices("r", range(20), n=3, max_tokens=4)
    rig.run(steps=2)
    rig.scheduler._preempt(leader)  # at the worst moment
    rig.run()
    for i in range(3):
        assert rig.tokens(f"r/{i}") == rig.expected(f"r/{i}", 4)


def test_cancelling_one_choice_leaves_the_others_alone() -> None:
    rig = Rig(blocks=64)
    rig.choices("r", range(10), n=3, max_tokens=12)
    rig.run(steps=4)
    rig.engine.cancel("r/1")
    rig.run()
    assert len(rig.tokens("r/1")) < 12
    assert [rig.tokens(f"r/{i}") for i in (0, 2)] == [rig.expected(f"r/{i}", 12) for i in (0, 2)]


def test_choices_of_a_request_that_was_refused_are_refused_too_and_do_not_hang() -> None:
    rig = Rig(blocks=4)
    rig.choices("r", range(20), n=2)
    rig.run()
    assert all(isinstance(rig.outputs[f"r/{i}"][0].error, InvalidRequest) for i in range(2))


def test_choices_of_a_prompt_that_cannot_be_computed_fail_one_by_one() -> None:
    """The leader fails, so the next one leads, and fails as well; nothing is left behind."""
    rig = Rig(blocks=64)
    rig.choices("r", [1, 2, rig.runner.POISON], n=3)
    rig.submit("fine", [1, 2, 3])
    rig.run()
    assert all(isinstance(rig.outputs[f"r/{i}"][0].error, ComputeError) for i in range(3))
    assert rig.tokens("fine") == rig.expected("fine", 4)
    assert rig.pool.usage().live == 0


def test_a_choice_that_goes_on_elsewhere_stands_alone() -> None:
    """After a failover there is no leader: it reports what it found itself."""
    rig = Rig(blocks=64)
    seq = rig.submit("r/2", range(10), max_tokens=3, choice=2)
    rig.run()
    assert seq.finish_reason is FinishReason.LENGTH
    assert rig.tokens("r/2") == rig.expected("r/2", 3) and rig.outputs["r/2"][0].written_tokens == 8


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_are_told_once_and_take_nothing_from_the_cache(budget: int) -> None:
    """One per prompt token but the first, in chunks as well; and none is repeated after preemption."""
    rig = Rig(blocks=32, budget=budget)
    rig.submit("warm", range(12))
    rig.run()
    seq = rig.submit("scored", range(12), prompt_logprobs=2)
    rig.run(steps=2)
    if budget == 3:
        rig.scheduler._preempt(seq)
    rig.run()
    told = [entry for output in rig.outputs["scored"] for entry in output.prompt_logprobs]
    assert told == [rig.runner.logprobs(list(range(i)), i, 2) for i in range(1, 12)]
    assert all(output.cached_tokens == 0 for output in rig.outputs["scored"])
    first_token = next(i for i, output in enumerate(rig.outputs["scored"]) if output.tokens)
    assert not any(output.prompt_logprobs for output in rig.outputs["scored"][first_token + 1 :])
