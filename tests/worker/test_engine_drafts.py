"""Room for drafts: what is reserved, what never is, and that nothing generated depends on it."""

from __future__ import annotations

import pytest
from engine_rig import Rig

from kvhive.worker.sequence import FinishReason


def test_drafts_change_how_fast_tokens_come_and_never_which() -> None:
    """And what was drafted and accepted is told exactly."""
    steps = []
    for drafts in (0, 4):
        rig = Rig(blocks=64, drafts=drafts)
        for i in range(3):
            rig.submit(f"r{i}", range(10 * i, 10 * i + 6), max_tokens=30)
        rig.run()
        for i in range(3):
            assert rig.tokens(f"r{i}") == rig.expected(f"r{i}", 30)
            last, seq = rig.outputs[f"r{i}"][-1], rig.sequences[f"r{i}"]
            assert (last.drafted, last.accepted) == (seq.drafted, seq.accepted)
            assert seq.accepted == 30 - len(rig.outputs[f"r{i}"])
            assert bool(seq.drafted) == bool(drafts) and seq.accepted <= seq.drafted
        steps.append(rig.engine.steps)
        assert rig.engine.load.drafted_tokens == sum(seq.drafted for seq in rig.sequences.values())
        assert rig.engine.load.accepted_tokens == sum(seq.accepted for seq in rig.sequences.values())
    assert steps[1] < steps[0] * 0.7


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_drafts_end_where_the_sequence_ends(max_tokens: int) -> None:
    """Never a draft for a position that could not be kept, at the end of context and pool too."""
    rig = Rig(blocks=4, drafts=8)
    rig.submit("a", range(16 - max_tokens), max_tokens=max_tokens)
    for _ in range(20):
        rig.run(steps=1)
        assert all(len(seq.block_table) <= 4 for seq in rig.scheduler.running)
    assert len(rig.tokens("a")) == max_tokens
    assert rig.sequences["a"].finish_reason is FinishReason.LENGTH


def test_nothing_after_a_stop_token_is_kept_although_it_was_accepted() -> None:
    rig = Rig(blocks=64, drafts=6)
    rig.prompts["probe"] = [1, 2, 3]
    stop = rig.expected("probe", 7)[6]
    seq = rig.submit("a", [1, 2, 3], max_tokens=30, stop=[stop], logprobs=1)
    rig.run()
    assert rig.tokens("a") == rig.expected("a", 7) and seq.finish_reason is FinishReason.STOP
    assert sum(len(output.logprobs) for output in rig.outputs["a"]) == 7


def test_kv_of_rejected_drafts_is_never_found_by_others() -> None:
    """Ten turns, each the whole conversation so far: full hits, and the answers of a cold engine."""
    rig = Rig(blocks=200, drafts=5)
    history = list(range(6))
    for turn in range(10):
        rig.submit(f"t{turn}", history, max_tokens=9)
        rig.run()
        assert rig.tokens(f"t{turn}") == rig.expected(f"t{turn}", 9)
        if turn:
            assert rig.cached(f"t{turn}") >= (len(history) - 3) // 4 * 4 - 4
        history = [*history, *rig.tokens(f"t{turn}"), 7, 7]


def test_drafts_get_what_the_budget_leaves_and_prompts_come_first() -> None:
    rig = Rig(blocks=64, budget=10, drafts=4)
    for i in range(2):
        rig.submit(f"d{i}", [i], max_tokens=40)
    rig.run(steps=1)
    rig.submit("prompt", range(100, 117))
    for prompt_tokens, drafts in ((8, 0), (8, 0), (1, 7)):
        rig.run(steps=1)
        assert [len(chunk.token_ids) for chunk in rig.runner.asked] == [1, 1, prompt_tokens]
        assert sum(chunk.max_drafts for chunk in rig.runner.asked) == drafts


def test_drafts_preempt_nobody_and_give_their_blocks_back_first() -> None:
    """The tight pool of the preemption test: the same sequences, no more preemptions than without."""
    preemptions = []
    for drafts in (0, 4):
        rig = Rig(blocks=12, budget=16, drafts=drafts)
        for i in range(4):
            rig.submit(f"r{i}", range(100 * i, 100 * i + 9), max_tokens=30)
        rig.run()
        preemptions.append(rig.scheduler.preemptions)
        assert all(seq.preemptions <= 3 for seq in rig.sequences.values())
    assert preemptions[1] <= preemptions[0]


def test_a_request_that_speculates_does_not_wait_for_others_and_they_not_for_it() -> None:
    """A decoding neighbour is in every step, whatever drafts are tried."""
    rig = Rig(blocks=128, budget=6, drafts=5)
    rig.submit("plain", [1], max_tokens=60)
    rig.submit("other", [2], max_tokens=60)
    rig.run(steps=1)
    for _ in range(15):
        before = {name: len(rig.tokens(name)) for name in ("plain", "other")}
        rig.run(steps=1)
        if rig.scheduler.idle or len(rig.scheduler.running) < 2:
            break
        assert all(len(rig.tokens(name)) > count for name, count in before.items())
    rig.run()
