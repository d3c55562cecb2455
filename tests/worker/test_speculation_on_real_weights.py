"""On real weights, with right and wrong drafts: log-probabilities, ends and cached blocks are as without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from real_engine import BLOCK, CONTEXT, VOCABULARY, RealEngine, request, tiny_model

from kvhive.worker.sequence import FinishReason


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "target", 2, 1)


@pytest.fixture(scope="module")
def cold(model: Path) -> RealEngine:
    """Where requests run alone, with nothing cached and without drafts."""
    return RealEngine(model, blocks=40, budget=CONTEXT)


def repetitive(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    unit = [rng.randrange(VOCABULARY) for _ in range(5)]
    return (unit * (length // 5 + 1))[:length]


@pytest.fixture(params=["itself", "another"])
def drafter(request: pytest.FixtureRequest) -> str:
    """Who drafts: the model itself, which is right, or one that agrees with it now and then."""
    return str(request.param)


@pytest.fixture
def speculating(drafter: str, model: Path, tmp_path: Path) -> RealEngine:
    small = model if drafter == "itself" else tiny_model(tmp_path, 1, 1)
    return RealEngine(model, 64, 24, "draft", small)


def test_log_probabilities_beside_a_chunked_prefill_are_those_of_the_request_alone(
    speculating: RealEngine, cold: RealEngine
) -> None:
    """Three that decode with drafts while a long prompt comes in small chunks."""
    asked = [request(f"r{i}", repetitive(i, 12), 20, logprobs=2) for i in range(3)]
    long = request("long", [(7 * i) % VOCABULARY for i in range(150)], 5, logprobs=2)
    expected = {}
    for seq in (*asked, long):
        cold.run_cold(seq)
        expected[seq.request_id] = cold.tokens(seq.request_id), cold.logprobs(seq.request_id)
    for seq in asked:
        speculating.submit(seq)
    for _ in range(3):
        speculating.engine.step()
    speculating.run(long)
    for name, (tokens, logprobs) in expected.items():
        assert speculating.tokens(name) == tokens
        for own, other in zip(speculating.logprobs(name), logprobs, strict=True):
            assert abs(own.logprob - other.logprob) < 1e-3
            assert [token for token, _ in own.top] == [token for token, _ in other.top]
    assert speculating.scheduler.drafted > 0


@pytest.mark.parametrize("room", [1, 2, 4])
def test_drafts_end_with_the_models_context(speculating: RealEngine, cold: RealEngine, room: int) -> None:
    """The runner refuses a position beyond it; as many tokens come as there is room for."""
    seq = request("last", repetitive(room, CONTEXT - room), room)
    assert speculating.run(seq) == cold.run_cold(seq)
    assert speculating.sequences["last"].finish_reason is FinishReason.LENGTH
    assert len(speculating.tokens("last")) == room


def test_ten_turns_on_blocks_that_drafts_went_through_answer_as_cold_ones_without(
    drafter: str, speculating: RealEngine, cold: RealEngine
) -> None:
    """What rejected drafts wrote is never found, and who was right stays right."""
    history, asked, answers, shares = repetitive(9, 20), [], [], []
    scheduler = speculating.scheduler
    for turn in range(10):
        drafted, accepted = scheduler.drafted, scheduler.accepted
        end = (len(history) + 20) // BLOCK * BLOCK + turn % 3  # at a block's border, and just behind it
        asked.append(request(f"turn {turn}", history, end - len(history)))
        answers += speculating.run(asked[-1])
        shares.append((scheduler.accepted - accepted) / (scheduler.drafted - drafted))
        if turn:
            computed = len(asked[-2].tokens) + len(answers[-2]) - 1
            assert speculating.cached(f"turn {turn}") == computed // BLOCK * BLOCK
        history = [*history, *answers[-1], *repetitive(turn, 4)]
    assert answers == cold.run_cold(*asked)
    assert min(shares) > 0.9 if drafter == "itself" else max(shares) < 0.9
