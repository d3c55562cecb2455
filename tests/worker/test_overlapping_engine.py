"""On a device that computes by itself, a step is told while the next one runs: nothing lost, nothing late."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

import pytest
from engine_rig import DraftingRunner, Rig

from kvhive.proto.errors import Unavailable
from kvhive.worker.model_runner import Chunk, ChunkResult


class OverlappingRunner(DraftingRunner):
    """Computes when it is launched, as a device would; `during` is called before the step's end."""

    overlaps = True
    during: Callable[[], None] = staticmethod(lambda: None)

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Compute now, answer later."""
        results = self.run(chunks)

        def wait() -> list[ChunkResult]:
            self.during()
            return results

        return wait


class OverlappingRig(Rig):
    """A rig whose runner overlaps."""

    def __init__(self, blocks: int, **fields: object) -> None:
        super().__init__(blocks, **fields)  # type: ignore[arg-type]
        self.runner = self.engine._runner = OverlappingRunner(blocks, 4)


@pytest.fixture
def rig() -> OverlappingRig:
    return OverlappingRig(24)


def test_a_step_s_tokens_are_told_during_the_next_one_and_the_last_ones_at_once(rig: OverlappingRig) -> None:
    told: list[int] = []
    rig.runner.during = lambda: told.append(len(rig.tokens("a")))  # type: ignore[attr-defined]
    rig.submit("a", range(6), max_tokens=4)
    rig.run()
    assert told == [0, 1, 2, 3]
    assert rig.tokens("a") == rig.expected("a", 4) and rig.outputs["a"][-1].finish is not None


def test_every_request_gets_its_tokens_once_whatever_preempts_whom(rig: OverlappingRig) -> None:
    lengths = {f"r{i}": 3 + 5 * i for i in range(9)}
    for number, (name, length) in enumerate(lengths.items()):
        rig.submit(name, range(number, number + 11), max_tokens=length)
    rig.run()
    assert rig.scheduler.preemptions > 0
    for name, length in lengths.items():
        assert rig.tokens(name) == rig.expected(name, length)
        assert sum(output.finish is not None for output in rig.outputs[name]) == 1


def test_a_request_cancelled_between_two_steps_hears_nothing_of_the_first(rig: OverlappingRig) -> None:
    rig.submit("a", range(6), max_tokens=50)
    rig.submit("b", range(6), max_tokens=8)
    rig.step()
    rig.step()
    before = len(rig.tokens("a"))
    rig.engine.cancel("a")
    rig.run()
    assert len(rig.tokens("a")) == before and all(o.finish is None for o in rig.outputs["a"])
    assert rig.tokens("b") == rig.expected("b", 8)


def test_a_step_that_fails_does_not_take_the_one_before_with_it(rig: OverlappingRig) -> None:
    rig.submit("a", range(6), max_tokens=50)
    rig.step()
    rig.step()
    rig.runner.fails = True
    with pytest.raises(RuntimeError, match="told to fail"):
        rig.step()
    rig.engine.abandon(Unavailable("broken"))
    assert rig.tokens("a") == rig.expected("a", 2)
    assert isinstance(rig.outputs["a"][-1].error, Unavailable)


def test_a_refusal_is_told_without_a_step(rig: OverlappingRig) -> None:
    rig.submit("large", range(6), max_tokens=1000)
    rig.step()
    assert rig.outputs["large"][0].error is not None


def test_the_end_of_the_last_running_request_is_told_while_others_wait_for_pins(rig: OverlappingRig) -> None:
    rig.submit("a", range(6), max_tokens=3)
    rig.step()
    rig.scheduler.kept_out._waiting[rig.sequences["a"]] = math.inf, 1
    for _ in range(2):
        rig.step()
    assert rig.outputs["a"][-1].finish is not None


def test_a_broken_pool_keeps_no_error_from_who_waits(rig: OverlappingRig) -> None:
    rig.submit("a", range(6), max_tokens=50)
    rig.step()
    rig.step()

    def broken(events: object) -> None:
        raise RuntimeError("broken")

    object.__setattr__(rig.engine._hooks, "publish", broken)
    with pytest.raises(RuntimeError, match="broken"):
        rig.engine.abandon(Unavailable("gone"))
    assert isinstance(rig.outputs["a"][-1].error, Unavailable)
