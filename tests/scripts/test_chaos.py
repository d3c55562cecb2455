"""The chaos suite, small; and that its judgement can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhive.scripts import chaos, chaos_invariants, private_network
from kvhive.scripts.chaos_cluster import ClusterSize
from kvhive.scripts.chaos_invariants import Baseline
from kvhive.scripts.chaos_load import Tally
from kvhive.scripts.chaos_redis import RedisServer
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_work import Transcript, make_work, stopped
from kvhive.worker.transfer_lanes import MAX_LANES


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # routers, on purpose
def test_a_short_run_strikes_and_nothing_that_never_may_happens() -> None:
    """Workers, routers, Redis and, where it may, links are struck under load; all is accounted for."""
    plan = chaos.ChaosPlan(seconds=20, seed="ci", per_second=2, fault_gap_s=1.0, kinds=18)
    size = ClusterSize(workers=2, sentinel=False, links=private_network.possible())
    before = private_network.left_over()
    told: list[str] = []
    result = chaos.run_chaos(plan, size, lambda subject, text: told.append(text))
    assert result["violation_list"] == []
    assert result["violations"] == 0
    assert result["faults"] >= 5 and len(result["faults_by_kind"]) >= 3
    assert result["requests"] + result["load"]["in_the_dark"] >= 10
    assert result["answered"] >= 0.9 * result["requests"] - 1, "on a busy machine some are late"
    assert told[0] == "starting" and "violations" in told[-1]
    assert private_network.left_over() == before


def transcript(**changes: str) -> Transcript:
    """An answer of one choice in three pieces, of the first request."""
    seen = Transcript(make_work("t", 1, 512, 1024)[0])
    for piece, token in (("a", 1), ("b", 2), ("c", 3)):
        seen.delta(0, piece, [token])
    seen.finish(0, "length")
    seen.usage(len(seen.work.prompt), 3)
    return seen


def test_what_differs_from_the_expected_answer_is_seen() -> None:
    expected = transcript()
    assert transcript().differences(expected, complete=True) == []
    assert transcript().whole

    twice = transcript()
    twice.finish(0, "length")
    twice.delta(0, "d", [4])
    assert twice.problems == ["choice 0 ends twice", "choice 0 goes on after its end"]

    cut = Transcript(expected.work)
    cut.delta(0, "ab", [1, 2])
    assert cut.differences(expected, complete=False) == []
    assert len(cut.differences(expected, complete=True)) == 4  # end, text, tokens and usage
    assert not cut.whole

    doubled = Transcript(expected.work)
    doubled.delta(0, "ab", [1, 2])
    doubled.delta(0, "b", [2])
    assert len(doubled.differences(expected, complete=False)) == 2

    charged = transcript()
    charged.usage(1, 3)
    [difference] = charged.differences(expected, complete=True)
    assert difference.startswith("usage is [")

    stranger = Transcript(expected.work)
    stranger.delta(7, "x")
    assert stranger.problems == ["output of choice 7 of 1"]


def test_the_same_seed_is_the_same_work_of_every_kind() -> None:
    work = make_work("1", 30, 512, 1024)
    assert work == make_work("1", 30, 512, 1024) != make_work("2", 30, 512, 1024)
    assert {each.n for each in work} == {1, 2, 3}
    assert sum(each.by_http for each in work) >= 6
    answer = transcript()
    answer.choices[0].text = "ab\ufffdcdef"
    assert stopped(answer.work, answer).stop == "cde"
    assert stopped(answer.work, Transcript(answer.work)) == dataclasses.replace(answer.work, stop="")


def test_trouble_excuses_only_who_was_struck() -> None:
    trouble = Trouble()
    mark = trouble.mark("r1")
    with trouble.striking("router_kill", "r1"):
        assert not trouble.quiet_since("r1", trouble.mark("r1")) and trouble.quiet_since("r2", 0)
    assert not trouble.quiet_since("r1", mark) and trouble.quiet_since("r1", trouble.mark("r1"))
    assert trouble.faults == {"router_kill": 1} and not trouble.struck
    assert not trouble.dark_within(60)
    with trouble.darkness():
        assert trouble.dark
    assert not trouble.dark and trouble.blackouts == 2 and trouble.dark_within(60)


def test_growth_beyond_the_baseline_is_a_leak() -> None:
    baseline = Baseline()
    baseline.learn("worker", 40, 5)
    spare = chaos_invariants.SPARE_SOCKETS
    assert baseline.problems("worker", "w1", 40 + spare, 5 + chaos_invariants.SPARE_TASKS) == []
    assert baseline.problems("worker", "w1", 41 + spare, 50) == [
        f"w1 has {41 + spare} file descriptors, at first 40",
        "w1 has 50 tasks, at first 5",
    ]
    met = chaos_invariants.SOCKETS_A_PEER * MAX_LANES
    assert baseline.problems("worker", "w1", 40 + spare + met, 5, peers=99) == []
    assert len(baseline.problems("worker", "w1", 41 + spare + met, 5, peers=99)) == 1


def test_violations_are_all_counted_and_some_kept() -> None:
    tally = Tally()
    for number in range(200):
        tally.violated(f"{number}")
    assert tally.violation_count == 200 and len(tally.violations) == 100


def test_options_out_of_range_are_refused_by_name() -> None:
    refused = CliRunner().invoke(chaos.main, ["--workers", "1"])
    assert refused.exit_code == 2
    assert "--workers" in refused.output and "2<=x<=16" in refused.output


def test_a_redis_that_was_made_master_comes_back_as_one(tmp_path: Path) -> None:
    """Or two servers would follow each other, and no sentinel could help: a fault that nobody meant."""
    first = RedisServer(tmp_path / "first", "127.0.0.1", None)
    second = RedisServer(tmp_path / "second", "127.0.0.1", None, (f"replicaof 127.0.0.1 {first.port}",))
    try:
        first.start()
        second.start()
        with second.client() as client:
            assert client.execute_command("ROLE")[0] == b"slave"
            client.execute_command("REPLICAOF", "NO", "ONE")  # as a sentinel does
            client.config_rewrite()
        second.end()
        second.start()
        with second.client() as client:
            assert client.execute_command("ROLE")[0] == b"master"
    finally:
        first.end()
        second.end()
