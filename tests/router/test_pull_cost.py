"""Pull or compute: the faster of the two, by what each worker has measured, and who is the source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placing_rig import BLOCK, PlacedFleet, cold_prompt

from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.pull_cost import UNMEASURED_BYTES_PER_S, UNMEASURED_LATENCY_S, crossover_blocks
from kvhive.router.routing_cost import compare
from kvhive.router.routing_policy import Candidate, RouteReason, RouteRequest, Speed

SPEED = Speed(step_base_s=0.0, per_token_s=0.001, per_attention_s=0.0, max_step_tokens=10_000)
FAST = Candidate(
    worker_id="",
    matched_blocks=0,
    expected_blocks=0,
    queue_tokens=0,
    decoding=0,
    speed=SPEED,
    victim_reuse=0.0,
    free_tokens=10_000,
    capacity_tokens=10_000,
    recent_cold_tokens=0.0,
    block_bytes=1_000_000,
    pull_latency_s=0.01,
    pull_bytes_per_s=1e9,
)
"""A block takes 16 ms to compute and 1 ms to pull."""


def worker(name: str, held: int = 0, **changes: object) -> Candidate:
    changes.setdefault("expected_blocks", held)
    return replace(FAST, worker_id=name, matched_blocks=held, **changes)  # type: ignore[arg-type]


def route(blocks: int = 40) -> RouteRequest:
    return RouteRequest(blocks * 16 + 1, 16, 16, b"home")


def test_where_pulling_is_faster_its_time_and_the_rest_are_what_counts() -> None:
    costs = compare(route(), [worker("a", 30), worker("b"), worker("c", 10)])
    assert costs.pulls.source == 0
    assert costs.pulls.blocks.tolist() == [0, 30, 30]
    np.testing.assert_allclose(costs.pulls.pull_s, [0.0, 0.01 + 0.030, 0.01 + 0.020])
    np.testing.assert_allclose(costs.compute_s, [0.161, 0.161 + 0.04, 0.161 + 0.03])
    assert (costs[1].pulled_blocks, costs[1].pull_s) == (30, pytest.approx(0.04))


def test_where_computing_is_faster_nothing_changes() -> None:
    slow = {"pull_bytes_per_s": 1e7}
    costs = compare(route(), [worker("a", 30), worker("b", **slow), worker("c", 10, **slow)])
    assert costs.pulls.blocks.tolist() == [0, 0, 0]
    np.testing.assert_allclose(costs.compute_s, [0.161, 0.641, 0.481])


def test_one_that_has_not_measured_yet_is_given_a_chance() -> None:
    costs = compare(route(), [worker("a", 30), worker("b", pull_bytes_per_s=0.0, pull_latency_s=0.0)])
    expected = UNMEASURED_LATENCY_S + 30 * 1_000_000 / UNMEASURED_BYTES_PER_S
    assert costs.pulls.pull_s[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    "holder", [{"block_bytes": 0}, {"block_bytes": 2_000_000}, {"held": 0, "expected_blocks": 30}]
)
def test_nobody_pulls_from_one_that_cannot_give(holder: dict[str, int]) -> None:
    """Where blocks do not move, where they are of another size, and where they are only predicted."""
    costs = compare(route(), [worker("a", **{"held": 30, **holder}), worker("b")])
    assert not costs.pulls.blocks.any()


def test_of_equal_sources_the_less_busy_one_gives() -> None:
    costs = compare(route(), [worker("a", 30, requests=3), worker("b"), worker("c", 30, requests=1)])
    assert costs.pulls.source == 2


def test_what_counts_as_nothing_is_not_pulled_either() -> None:
    costs = compare(route(), [worker("a", 4), worker("b")], least_blocks=5.0)
    assert not costs.pulls.blocks.any()


def test_a_busy_holder_s_prefix_goes_to_an_idle_worker_by_a_pull() -> None:
    candidates = [worker("a", 38, queue_tokens=3000), worker("b")]
    decision = KvAwarePolicy().decide(route(), candidates)
    assert decision is not None
    assert (decision.worker_id, decision.reason) == ("b", RouteReason.REPLICA)
    assert decision.costs[1].pulled_blocks == 38


def test_columns_and_rows_say_the_same() -> None:
    from kvhive.router.candidate_table import CandidateTable

    candidates = [worker("a", 3, requests=2), worker("b", pull_latency_s=0.5)]
    assert list(CandidateTable.of(candidates)) == candidates


def test_the_crossover_is_where_the_two_lines_meet() -> None:
    def step_s(blocks: int) -> float:
        return 0.005 + blocks * 0.016

    assert crossover_blocks(1_000_000, 0.1, 1e9, step_s, 1000) == 7
    assert step_s(7) > 0.1 + 7 * 0.001 and step_s(6) <= 0.1 + 6 * 0.001
    assert crossover_blocks(1_000_000, 0.1, 1e7, step_s, 1000) == 0
    assert crossover_blocks(1_000_000, 0.1, 0.0, step_s, 1000) == 0
    assert crossover_blocks(0, 0.1, 1e9, step_s, 1000) == 0


def test_a_placement_names_the_source_and_reserves_only_what_is_computed() -> None:
    fleet = PlacedFleet(0)
    fleet.join("w0", "w1", block_bytes=1_000_000, pull_latency_s=0.001, pull_bytes_per_s=1e10)
    prompt = cold_prompt(1, 100 * BLOCK + 5)
    first = fleet.send(prompt)
    assert first.source is None
    fleet.complete()
    fleet.report()
    other = fleet.placers[0].place("avoiding", prompt, 16, avoid={first.worker_id})
    assert other.source is None, "who is to be avoided is no source either"
    fleet.states[0].loads.finish("avoiding", fleet.clock())
    fleet.states[0].predicted.drop(other.worker_id)

    loads = fleet.states[0].loads
    loads.reserve("busy", first.worker_id, 50_000, fleet.clock())
    pulled = fleet.placers[0].place("pulled", prompt, 16)
    assert pulled.worker_id == other.worker_id
    assert pulled.source is not None
    assert (pulled.source.worker_id, pulled.source.blocks) == (first.worker_id, 100)
    assert pulled.decision.pull_from == first.worker_id
    assert loads.queue_tokens(pulled.worker_id, 0, fleet.clock()) == 5
    assert pulled.matched_blocks == 0, "what is on its way is not called held"


def test_where_blocks_do_not_move_nobody_is_named() -> None:
    fleet = PlacedFleet(2)
    prompt = cold_prompt(1, 100 * BLOCK)
    first = fleet.send(prompt)
    fleet.complete()
    fleet.report()
    fleet.states[0].loads.reserve("busy", first.worker_id, 50_000, fleet.clock())
    assert fleet.placers[0].place("other", prompt, 16).source is None
