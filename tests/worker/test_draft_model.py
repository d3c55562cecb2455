"""A draft model agrees as often as it can, and catches up with whatever its pool lacks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from speculation_rig import BLOCK_SIZE, Bench, Generation

from kvhive.proto.errors import ModelError
from kvhive.worker.draft_model import SHORT_LAG, DraftModel
from kvhive.worker.model_runner import Chunk
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.simulated_runner import SimulatedRunner
from kvhive.worker.speculative_runner import SpeculativeRunner

BLOCKS = 512


class Recording(SimulatedRunner):
    """Also remembers what it was asked, and that no slot is written twice in one step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps: list[list[Chunk]] = []

    def run(self, chunks):
        self.steps.append([replace(chunk, token_ids=list(chunk.token_ids)) for chunk in chunks])
        slots = [
            self._slot(chunk, chunk.start + index)
            for chunk in chunks
            for index in range(len(chunk.token_ids))
        ]
        assert len(set(slots)) == len(slots), "two sequences write one slot"
        return super().run(chunks)


class Pair:
    """A target and a draft model that are the same model, in pools of their own."""

    def __init__(self, catch_up=64, draft_context=8192):
        self.target = SimulatedRunner(BLOCKS, BLOCK_SIZE)
        self.draft = Recording(BLOCKS, BLOCK_SIZE, max_context=draft_context)
        drafter = DraftModel(self.draft, self.target.shape, BLOCKS, BLOCK_SIZE, catch_up)
        self.runner = SpeculativeRunner(self.target, drafter, lambda: 0.0)


def generations(count, max_tokens=30, longest=60):
    rng = random.Random(count)
    return [
        Generation(
            [rng.randrange(900) for _ in range(rng.randint(1, longest))],
            SamplingParams(max_tokens, temperature=1.0, choice=i % 3),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("max_drafts", [1, 3, 6])
def test_a_model_that_drafts_for_itself_is_always_right(max_drafts) -> None:
    """Whatever the batch, the choice and the block borders; a draft too many or too few would show."""
    plain = Bench(SimulatedRunner(BLOCKS, BLOCK_SIZE)).run(generations(6))
    pair = Pair()
    speculated = generations(6)
    bench = Bench(pair.runner, max_drafts)
    assert bench.run(speculated) == plain
    assert bench.accepted == bench.drafted > 0
    assert all(seq.drafted for seq in speculated)


def test_it_stays_right_over_many_turns_of_a_conversation() -> None:
    """Each turn finds the blocks of the last one cached; nothing in the draft's pool has gone stale."""
    pair = Pair()
    bench = Bench(pair.runner, 3)
    rng = random.Random(5)
    turn = generations(1)[0]
    for _ in range(10):
        before = bench.drafted
        bench.run([turn])
        assert bench.accepted == bench.drafted > before
        turn = turn.follow_up([rng.randrange(900) for _ in range(rng.randint(1, 9))], rng.randint(10, 30))


def test_steps_without_drafts_cost_nothing_and_are_caught_up_with() -> None:
    """What the target computed alone is computed in the draft's pool when drafts are wanted again."""
    pair = Pair()
    bench = Bench(pair.runner, 0)
    generation = generations(1, max_tokens=40)[0]
    generation.goal -= 20
    bench.run([generation])
    assert pair.draft.steps == []
    generation.goal += 20
    bench.max_drafts = 3
    bench.run([generation])
    assert bench.accepted == bench.drafted > 0
    assert pair.draft.steps[0][0].start == 0


def test_a_long_prompt_is_caught_up_with_in_bounded_pieces() -> None:
    pair = Pair(catch_up=50)
    generation = Generation(list(range(400)), SamplingParams(30))
    bench = Bench(pair.runner, 3)
    bench.run([generation])
    sizes = [sum(len(chunk.token_ids) for chunk in step) for step in pair.draft.steps]
    assert sizes[:8] == [50] * 8 and max(sizes) == 50
    assert bench.accepted == bench.drafted > 0


def test_of_several_sequences_that_lack_a_shared_prefix_one_computes_it() -> None:
    """No slot is written twice in a step, and the others find it done."""
    pair = Pair(catch_up=200)
    bench = Bench(pair.runner, 0)
    first = Generation(list(range(100)), SamplingParams(2))
    bench.run([first])
    bench.max_drafts = 3
    bench.run(first.follow_up([number], 20) for number in range(4))
    assert bench.accepted == bench.drafted > 0
    computed = [chunk for step in pair.draft.steps for chunk in step if chunk.start == 0]
    assert len(computed) == 1


def test_a_block_that_gets_another_content_is_not_taken_for_the_old_one() -> None:
    pair = Pair()
    bench = Bench(pair.runner, 3)
    (old,) = generations(1)
    bench.run([old])
    new = Generation([7, *range(50)], SamplingParams(30), table=list(old.table))
    plain = Generation([7, *range(50)], SamplingParams(30))
    bench.run([new])
    assert [new.output] == Bench(SimulatedRunner(BLOCKS, BLOCK_SIZE)).run([plain])
    assert bench.accepted == bench.drafted


def test_a_pool_that_was_not_written_costs_acceptance_only() -> None:
    """Blocks that came from elsewhere: the draft's pool holds something else than it thinks."""
    pair = Pair()
    bench = Bench(pair.runner, 3)
    (turn,) = generations(1)
    bench.run([turn])
    for block in turn.table:
        for offset in range(BLOCK_SIZE):
            pair.draft._slots[block * BLOCK_SIZE + offset] = 3
    turn = turn.follow_up([1, 2], 25)
    plain = Generation(list(turn.history), turn.sampling)
    bench.run([turn])
    assert [turn.output] == Bench(SimulatedRunner(BLOCKS, BLOCK_SIZE)).run([plain])
    assert turn.accepted < turn.drafted


def test_drafting_ends_at_a_stop_token_and_at_the_drafts_own_context() -> None:
    tokens = Bench(SimulatedRunner(BLOCKS, BLOCK_SIZE)).run([Generation([1, 2], SamplingParams(12))])[0]
    stopping = SamplingParams(12, stop_token_ids=frozenset({tokens[2]}))
    pair = Pair()
    chunk = Chunk([1, 2, tokens[0]], 0, [0, 1, 2], stopping, history=[1, 2, tokens[0]], max_drafts=6)
    (result,) = pair.runner.run([chunk])
    assert (result.drafted, list(result.tokens)) == (2, tokens[1:4])
    pair = Pair(draft_context=10)
    generation = Generation([1, 2], SamplingParams(12))
    assert Bench(pair.runner, 4).run([generation]) == [tokens]
    last = max(chunk.start + len(chunk.token_ids) for step in pair.draft.steps for chunk in step)
    assert 0 < last <= 10


def test_a_draft_model_that_fails_proposes_nothing() -> None:
    """Its logits are not finite after this token; the target's are."""

    class Sound(SimulatedRunner):
        POISON = 998

    target, draft = Sound(BLOCKS, BLOCK_SIZE), SimulatedRunner(BLOCKS, BLOCK_SIZE)
    drafter = DraftModel(draft, target.shape, BLOCKS, BLOCK_SIZE, 64)
    prompt = [1, draft.POISON]
    chunk = Chunk(prompt, 0, [0, 1], SamplingParams(9), history=prompt, max_drafts=4)
    assert drafter.propose([chunk]) == [[]]


def test_a_short_lag_does_not_cost_a_step() -> None:
    """After a step whose drafts were all right, the last of them is computed with the next draft."""
    pair = Pair()
    Bench(pair.runner, 3).run([Generation(list(range(SHORT_LAG - 1)), SamplingParams(17))])
    assert [len(step[0].token_ids) for step in pair.draft.steps][:7] == [SHORT_LAG, 1, 1, 2, 1, 1, 2]


def test_another_size_of_vocabulary_is_refused() -> None:
    draft = SimulatedRunner(8, BLOCK_SIZE, vocab_size=999)
    with pytest.raises(ModelError, match="vocabulary of 999 tokens, the model one of 1000"):
        DraftModel(draft, SimulatedRunner(8, BLOCK_SIZE).shape, 8, BLOCK_SIZE, 64)
