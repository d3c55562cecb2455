"""Simulations whose answers are known: hits to the token, limits, sameness, lag, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from trace_files import opened, turn, write_trace

from kvhive.proto.errors import ConfigError
from kvhive.router.routing_policy import Candidate, RouteRequest, Speed
from kvhive.scripts.cli import cli
from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_limits import belady_hit_rate, infinite_hit_rate
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.sim_peers import PeerFacts, make_peer
from kvhive.scripts.sim_report import Goal, PolicyReport
from kvhive.scripts.simulate import lay_out, parse_policies, run_policy
from kvhive.scripts.trace_format import TraceRequest
from kvhive.scripts.trace_reader import read_trace

POLICIES = parse_policies("all")


def simulate(path: Path, policy: str = "kv_aware", **options: Any) -> PolicyReport:
    """Simulate as the command does, by default on two workers of 1000 blocks."""
    given = SimulateOptions(**{"workers": 2, "capacity_blocks": 1000, **options})
    study = lay_out(read_trace(path), given)
    return run_policy(study, policy, Goal(), lambda subject, text: None)[0]


@pytest.fixture
def repeats(tmp_path: Path) -> Path:
    """Five times the same prompt of ten blocks and eight tokens, a minute apart."""
    return write_trace(tmp_path / "repeats.jsonl", [opened(60.0 * n, 168, [0, 11]) for n in range(5)])


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Thirty sessions of four turns behind one system prompt of four blocks, ever longer."""
    rows = []
    for session in range(30):
        own = 1000 * (session + 1)
        for number in range(4):
            blocks = 4 + 60 * number
            runs = [0, 4] if number == 0 else [0, 4, own, blocks - 4]
            rows.append(turn(session, number, 16 * blocks, runs, think_s=0.5))
    return write_trace(tmp_path / "chats.jsonl", rows, mode="closed")


@pytest.mark.parametrize(
    "policy", ["kv_aware", "longest_prefix", "predicted_ttft", "dynamo", "sglang", "llm_d"]
)
def test_a_repeated_prompt_hits_all_its_full_blocks(repeats: Path, policy: str) -> None:
    report = simulate(repeats, policy)
    assert report.token_hit_rate == report.reachable_hit_rate == 4 * 160 / (5 * 168)
    assert report.infinite_hit_rate == report.belady_hit_rate == report.pooled_hit_rate == 4 * 160 / (5 * 168)
    assert (report.requests, report.refused, report.evictions, report.preemptions) == (5, 0, 0, 0)


def test_llm_d_gives_cold_prompts_to_each_worker_in_turn() -> None:
    """Who got none yet, then who got one longest ago; a prompt that somebody holds changes nothing."""
    facts = PeerFacts()
    peer, request = make_peer("llm_d", facts), RouteRequest(160, 8, 16, b"home", False)
    idle = [_candidate(name) for name in ("w1", "w2", "w3")]

    def place(candidates: list[Candidate]) -> str:
        decision = peer.decide(request, candidates)
        assert decision is not None
        facts.enter(decision.worker_id, [])
        return decision.worker_id

    assert [place(idle) for _ in range(4)] == ["w1", "w2", "w3", "w1"]
    assert place([*idle[:2], _candidate("w3", expected_blocks=5)]) == "w3"
    assert [place(idle) for _ in range(2)] == ["w2", "w3"]


def _candidate(worker_id: str, expected_blocks: int = 0) -> Candidate:
    speed = Speed(step_base_s=0.01, per_token_s=0.001, per_attention_s=0.0, max_step_tokens=512)
    return Candidate(worker_id, expected_blocks, expected_blocks, 0, 0, speed, None, 0, 10_000, 0.0)


def test_a_prompt_of_whole_blocks_computes_its_last_one(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [opened(60.0 * n, 160, [0, 10]) for n in range(2)])
    assert simulate(path).token_hit_rate == 144 / 320


def test_turns_find_what_the_turns_before_them_computed(tmp_path: Path) -> None:
    """On one worker: prompts of 33, 65 and 97 tokens, of which 0, 32 and 64 were there."""
    rows = [turn(0, n, 32 * (n + 1) + 1, [0, 2 * (n + 1), 50 + n, 1]) for n in range(3)]
    path = write_trace(tmp_path / "t.jsonl", rows, mode="closed")
    assert simulate(path, workers=1).token_hit_rate == (0 + 32 + 64) / (33 + 65 + 97)


def test_times_are_those_of_the_cost_model(tmp_path: Path) -> None:
    """One request alone: its prompt in one step, then a step per further token."""
    cost = CostModel(prefill_tokens_per_s=1000, step_base_s=0.01, per_attention_s=0.0)
    path = write_trace(tmp_path / "t.jsonl", [opened(0, 100, [0, 7], output=11)])
    report = simulate(path, cost=cost)
    assert report.ttft_mean_s == pytest.approx(0.01 + 0.1)
    assert report.tpot_mean_s == pytest.approx(0.01 + 0.001)
    assert report.duration_s == pytest.approx(0.11 + 10 * 0.011)


def test_a_newcomer_waits_for_one_step_not_for_a_whole_stretch_of_decoding(tmp_path: Path) -> None:
    """It comes in the middle of the 50th of many steps of 11 ms, and is computed after that one."""
    cost = CostModel(prefill_tokens_per_s=1000, step_base_s=0.01, per_attention_s=0.0)
    rows = [opened(0, 100, [0, 7], output=1000), opened(0.11 + 0.011 * 49.5, 100, [9, 7], output=1)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    report = simulate(path, workers=1, cost=cost)
    second = 0.011 * 0.5 + 0.01 + 0.1 + 0.001  # the step that runs, and its own, which decodes one more token
    assert report.ttft_mean_s == pytest.approx((0.11 + second) / 2)


def test_round_robin_computes_a_prompt_once_on_each_worker(repeats: Path) -> None:
    report = simulate(repeats, "round_robin")
    assert report.token_hit_rate == 3 * 160 / (5 * 168)
    assert report.reachable_hit_rate == 4 * 160 / (5 * 168)
    assert report.least_requests_share == 2 * 2 / 5


def test_a_small_pool_evicts_and_a_tiny_one_refuses(tmp_path: Path) -> None:
    """Three prompts in turn; each takes eleven blocks and leaves the first three of the last but one."""
    rows = [opened(60.0 * n, 160, [10 * (n % 3), 10]) for n in range(6)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    report = simulate(path, workers=1, capacity_blocks=24)
    assert (report.token_hit_rate, report.refused) == (3 * 48 / 960, 0)
    assert report.evictions > 0
    assert report.token_hit_rate < report.belady_hit_rate < report.infinite_hit_rate
    assert simulate(path, workers=1, capacity_blocks=10).refused == 6


def test_preempted_requests_are_served_in_the_end(tmp_path: Path) -> None:
    rows = [opened(0.001 * n, 160, [10 * n, 10], output=200) for n in range(4)]
    report = simulate(write_trace(tmp_path / "t.jsonl", rows), workers=1, capacity_blocks=50)
    assert report.preemptions > 0
    assert (report.requests, report.refused) == (4, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything_and_every_limit_holds(chats: Path, policy: str) -> None:
    report = simulate(chats, policy, workers=4, load=0.9)
    assert (report.requests, report.refused) == (120, 0)
    assert 0 < report.token_hit_rate <= report.infinite_hit_rate
    assert 0 < report.ttft_p50_s <= report.ttft_p90_s <= report.ttft_p99_s
    assert 1 <= report.imbalance <= 4
    assert 0 < report.goodput_share <= 1


def test_knowing_where_blocks_are_beats_not_knowing(chats: Path) -> None:
    ours, blind = (simulate(chats, policy, workers=4) for policy in ("kv_aware", "round_robin"))
    assert ours.token_hit_rate > blind.token_hit_rate + 0.2
    assert ours.ttft_mean_s < blind.ttft_mean_s


def test_an_index_that_is_late_is_bridged_by_what_was_sent(tmp_path: Path) -> None:
    """A second turn after a second finds its first, though the index hears of it after five; the report of
    what was reachable, which is the index's alone, does not."""
    rows = [turn(0, n, 16 * 20 * (n + 1), [0, 20 * (n + 1)], think_s=1.0) for n in range(4)]
    path = write_trace(tmp_path / "t.jsonl", rows, mode="closed")
    fresh, late = (simulate(path, workers=4, index_lag_s=lag) for lag in (0.0, 5.0))
    assert fresh.token_hit_rate == late.token_hit_rate
    assert fresh.reachable_hit_rate > late.reachable_hit_rate == 0.0


def request_of(blocks: list[int]) -> TraceRequest:
    runs = tuple(number for block in blocks for number in (block, 1))
    return TraceRequest(0.0, -1, 0, 0.0, 16 * len(blocks) + 1, 1, runs)


def test_belady_keeps_what_comes_back_first() -> None:
    """Two places, blocks 0 1 2 0 1: LRU keeps nothing of use, Belady 0 or 1."""
    requests = [request_of([block]) for block in (0, 1, 2, 0, 1)]
    assert belady_hit_rate(requests, 16, 16, capacity=1) == 16 / (5 * 17)
    assert (
        belady_hit_rate(requests, 16, 16, capacity=2) == infinite_hit_rate(requests, 16, 16) == 32 / (5 * 17)
    )


def run_command(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["simulate", str(path), *arguments])


def test_the_command_prints_a_list_for_programs_twice_the_same(chats: Path) -> None:
    arguments = ("--workers", "3", "--policy", "kv_aware,power_of_two,dynamo", "--load", "0.9", "--json")
    first, second = (run_command(chats, *arguments, "--seed", "5") for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    rows = json.loads(first.stdout)
    assert [row["policy"] for row in rows] == ["kv_aware", "power_of_two", "dynamo"]
    for row in rows:
        assert {"token_hit_rate", "reachable_hit_rate", "ttft_mean_s", "ttft_p99_s"} <= row.keys()


def test_the_command_prints_a_table_for_people(chats: Path, tmp_path: Path) -> None:
    result = run_command(chats, "--policy", "all", "--capacity-share", "0.5")
    assert result.exit_code == 0
    assert all(policy in result.stdout for policy in POLICIES)
    assert "Belady" in result.stdout


def test_a_figure_is_drawn(chats: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "policies.png"
    assert run_command(chats, "--policy", "kv_aware,dynamo", "--png", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "psychic"], "--policy: must be all or of kv_aware, round_robin"),
        (["--capacity-blocks", "5", "--capacity-share", "1"], "give one of --capacity-blocks"),
        (["--capacity-blocks", "90000000"], "--capacity-blocks: must be 1 to 6250000, is 90000000"),
        (["--rate", "fast"], "--rate: must be native or a factor"),
        (["--rate", "2", "--load", "0.9"], "--load: cannot be given together with --rate"),
        (["--block-size", "48"], "--block-size: must divide the trace's 16, is 48"),
    ],
)
def test_a_wrong_option_is_named(chats: Path, arguments: list[str], message: str) -> None:
    result = run_command(chats, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
