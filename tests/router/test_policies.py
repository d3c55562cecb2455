"""The policies by name: each one's rule, how users add their own, and what a wrong name is told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from kvhive.proto.config import ClusterConfig
from kvhive.proto.errors import ConfigError
from kvhive.router.policies import ENTRY_POINTS, by_name, make_policy, policy_names
from kvhive.router.policies.kv_aware import KvAwarePolicy
from kvhive.router.routing_policy import (
    Candidate,
    Decision,
    RouteReason,
    RouteRequest,
    RoutingPolicy,
    Speed,
)

OURS = ("kv_aware", "round_robin", "least_loaded", "power_of_two", "consistent_hash")
SPEED = Speed(step_base_s=0.01, per_token_s=0.001, per_attention_s=0.0, max_step_tokens=512)
IDLE = Candidate("w1", 0, 0, 0, 0, SPEED, 0.0, 0, 10_000, 0.0)


def worker(worker_id: str, **changes: object) -> Candidate:
    return replace(IDLE, worker_id=worker_id, **changes)  # type: ignore[arg-type]


def request(home: bytes = b"home") -> RouteRequest:
    return RouteRequest(640, 16, 16, home)


def chosen(policy: RoutingPolicy, *candidates: Candidate, home: bytes = b"home") -> str:
    decision = policy.decide(request(home), candidates)
    assert decision is not None
    return decision.worker_id


def test_the_names_are_known_and_the_default_is_one_of_them() -> None:
    assert policy_names()[: len(OURS)] == OURS
    assert isinstance(make_policy(ClusterConfig().router.policy), KvAwarePolicy)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        make_policy("kv-aware")
    assert str(error.value) == f"router.policy: must be one of {', '.join(policy_names())}, is 'kv-aware'"


@pytest.mark.parametrize("name", OURS)
def test_every_policy_chooses_a_candidate_or_nobody_of_nobody(name: str) -> None:
    """Whatever the load; with the same seed the same choices."""
    rng, decisions = random.Random(3), []
    policies = [make_policy(name, 7), make_policy(name, 7)]
    for _ in range(200):
        workers = [
            worker(f"w{i}", requests=rng.randrange(9), queue_tokens=rng.randrange(999), matched_blocks=i)
            for i in range(rng.randint(1, 6))
        ]
        home = rng.randbytes(8)
        first, second = (chosen(policy, *workers, home=home) for policy in policies)
        assert first == second and first in {candidate.worker_id for candidate in workers}
        decisions.append(first)
    assert len(set(decisions)) > 1
    assert make_policy(name).decide(request(), []) is None


def test_round_robin_gives_each_its_turn_and_skips_nobody_when_one_leaves() -> None:
    policy, workers = make_policy("round_robin", 1), [worker(f"w{i}") for i in range(4)]
    turns = [chosen(policy, *workers) for _ in range(8)]
    assert turns[:4] == turns[4:] and sorted(turns[:4]) == ["w0", "w1", "w2", "w3"]
    last = int(turns[-1][1])
    gone, after = f"w{(last + 1) % 4}", f"w{(last + 2) % 4}"
    assert chosen(policy, *(w for w in workers if w.worker_id != gone)) == after


def test_routers_do_not_all_begin_with_the_same_worker() -> None:
    workers = [worker(f"w{i}") for i in range(4)]
    assert len({chosen(make_policy("round_robin", seed), *workers) for seed in range(20)}) > 1


def test_least_loaded_counts_requests_then_tokens_and_equals_share() -> None:
    policy = make_policy("least_loaded", 1)
    assert chosen(policy, worker("w1", requests=2), worker("w2", requests=1, queue_tokens=999)) == "w2"
    tokens = worker("w1", requests=1, queue_tokens=10), worker("w2", requests=1, queue_tokens=9)
    assert chosen(policy, *tokens) == "w2"
    equals = Counter(chosen(policy, worker("w1"), worker("w2")) for _ in range(100))
    assert min(equals.values()) > 20


def test_power_of_two_never_takes_the_busiest_and_uses_the_others() -> None:
    policy, workers = make_policy("power_of_two", 1), [worker(f"w{i}", requests=i) for i in range(4)]
    choices = Counter(chosen(policy, *workers) for _ in range(600))
    assert "w3" not in choices and choices["w0"] > choices["w1"] > choices["w2"] > 50
    assert chosen(policy, worker("w9")) == "w9"


def test_consistent_hashing_stays_at_home_until_home_has_more_than_its_share() -> None:
    policy, workers = make_policy("consistent_hash"), [worker(f"w{i}") for i in range(4)]
    home = chosen(policy, *workers)

    def loads(of_home: int, of_others: int) -> list[Candidate]:
        return [worker(f"w{i}", requests=of_home if f"w{i}" == home else of_others) for i in range(4)]

    at_home = policy.decide(request(), loads(4, 4))
    assert at_home is not None and (at_home.worker_id, at_home.reason) == (home, RouteReason.HOME)
    passed_on = policy.decide(request(), loads(9, 4))
    assert passed_on is not None and passed_on.worker_id != home
    assert passed_on.reason is RouteReason.BALANCE
    rest = [w for w in workers if w.worker_id != home]
    assert passed_on.worker_id == chosen(policy, *rest), "the next in the request's own order"


class Last:
    """A policy of somebody else's."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        return Decision(candidates[-1].worker_id, RouteReason.POLICY)


def broken(seed: int | None) -> object:
    raise OSError("no file")


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let a package offer `attribute` of this file under a name."""

    def install(name: str, attribute: str) -> None:
        entry = EntryPoint(name, f"{__name__}:{attribute}", ENTRY_POINTS)
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
        monkeypatch.setattr(by_name, "entry_points", lambda group: [entry] if group == ENTRY_POINTS else [])

    return install


def test_a_package_may_offer_a_policy_of_its_own(offer: Callable[[str, str], None]) -> None:
    offer("last", "Last")
    assert policy_names() == (*OURS, "last")
    policy = make_policy("last", 5)
    assert isinstance(policy, Last) and policy.seed == 5
    assert chosen(policy, worker("w1"), worker("w2")) == "w2"


def test_no_package_replaces_a_policy_of_ours(offer: Callable[[str, str], None]) -> None:
    offer("kv_aware", "Last")
    assert policy_names() == OURS
    assert isinstance(make_policy("kv_aware"), KvAwarePolicy)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [("broken", "cannot be made: OSError('no file')"), ("Counter", "which cannot decide")],
)
def test_a_packages_policy_that_cannot_be_made_is_named(
    offer: Callable[[str, str], None], attribute: str, words: str
) -> None:
    offer("theirs", attribute)
    with pytest.raises(ConfigError) as error:
        make_policy("theirs")
    assert str(error.value).startswith("router.policy: 'theirs' (") and words in str(error.value)
