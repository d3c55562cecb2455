"""`kvhive status`: the document that programs rely on, and the table for people."""

import pytest

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.cluster_state import ClusterState
from kvhive.scripts.status_report import status_document, status_lines

STATE = ClusterState("default", "/tmp/x", "t", ready=True, grpc="127.0.0.1:1", http="http://127.0.0.1:2")


def answer() -> pb.GetClusterResponse:
    cluster = pb.GetClusterResponse(cluster="default", model="tiny", version="0.1.0")
    worker = cluster.workers.add(id="w1", state="serving", epoch=7, routable=True, device="cpu")
    worker.blocks.CopyFrom(pb.Blocks(total=10, live=1, cached=4, free=5, pinned=2))
    worker.prefix_query_tokens, worker.prefix_hit_tokens = 200, 50
    return cluster


def test_the_document_has_what_outside_checks_rely_on() -> None:
    document = status_document(STATE, answer())
    assert document["endpoints"] == {"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2"}
    (worker,) = document["workers"]
    assert (worker["id"], worker["state"], worker["epoch"]) == ("w1", "serving", 7)
    assert worker["blocks"] == {"total": 10, "live": 1, "cached": 4, "free": 5, "pinned": 2}


def test_the_table_is_plain_and_says_the_hit_rate() -> None:
    text = "\n".join(status_lines(status_document(STATE, answer())))
    assert "25%" in text and "serving" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("pulled", "shown"), [(0, "0%"), (60, "30%")])
def test_the_table_says_what_share_of_the_prompts_came_from_other_workers(pulled: int, shown: str) -> None:
    cluster = answer()
    worker = cluster.workers[0]
    worker.pulled_tokens, worker.pulls, worker.pull_fallbacks = pulled, 3, 1
    worker.pull_latency_s, worker.pull_bytes_per_s, worker.pull_crossover_blocks = 0.5, 1e9, 7
    document = status_document(STATE, cluster)
    told = document["workers"][0]
    assert (told["pulled_tokens"], told["pulls"], told["pull_fallbacks"]) == (pulled, 3, 1)
    assert (told["pull_latency_s"], told["pull_bytes_per_s"], told["pull_crossover_blocks"]) == (0.5, 1e9, 7)
    header, row = (line.split() for line in status_lines(document)[-2:])
    assert row[header.index("PULLED")] == shown


@pytest.mark.parametrize(
    ("drafted", "accepted", "shown"), [(0, 0, "-"), (800, 504, "63%"), (9, 0, "0%"), (7, 7, "100%")]
)
def test_the_table_says_how_many_drafts_were_accepted(drafted: int, accepted: int, shown: str) -> None:
    """Nothing drafted is a dash, which is not the same as nothing accepted."""
    cluster = answer()
    cluster.workers[0].drafted_tokens, cluster.workers[0].accepted_tokens = drafted, accepted
    document = status_document(STATE, cluster)
    (worker,) = document["workers"]
    assert (worker["drafted_tokens"], worker["accepted_tokens"]) == (drafted, accepted)
    header, row = (line.split() for line in status_lines(document)[-2:])
    assert row[header.index("ACCEPT")] == shown


def test_a_worker_that_is_skipped_after_a_failure_is_shown_as_cooling() -> None:
    cluster = answer()
    cluster.workers[0].routable = False
    assert "cooling" in "\n".join(status_lines(status_document(STATE, cluster)))


def test_a_cluster_without_workers_still_has_a_table() -> None:
    assert status_lines(status_document(STATE, pb.GetClusterResponse()))[-1].startswith("WORKER")


FLEET = {
    "wanted": 3,
    "autoscaling": True,
    "reason": "prefill",
    "free": "0 CPU, 0 GPU",
    "drains": {},
    "drained": {},
    "workers": [
        {"id": "w1", "stage": "serving", "detail": "serving"},
        {"id": "w2", "stage": "starting", "detail": "loading model"},
        {"id": "w3", "stage": "pending", "detail": "waiting for a place in Ray"},
    ],
}


def test_workers_that_no_router_knows_yet_are_shown_with_what_they_do() -> None:
    document = status_document(STATE, answer(), FLEET)
    states = {worker["id"]: (worker["state"], worker["blocks"]["total"]) for worker in document["workers"]}
    assert states == {"w1": ("serving", 10), "w2": ("starting", 0), "w3": ("pending", 0)}
    assert document["fleet"]["wanted"] == 3 and document["controller"]["answers"]
    text = "\n".join(status_lines(document))
    assert "workers wanted 3 (autoscaling: prefill)" in text
    assert "w2 starting: loading model" in text and "w3 pending: waiting for a place in Ray" in text
    assert "0 CPU, 0 GPU" in text


def test_without_a_controller_the_router_s_word_is_shown() -> None:
    document = status_document(STATE, answer())
    assert document["fleet"] is None and not document["controller"]["answers"]
    assert any("controller away" in line for line in status_lines(document))
