"""`kvhive prewarm`: what is asked, and what people and programs read of the answer."""

from __future__ import annotations

import json
from types import SimpleNamespace, TracebackType
from typing import Unpack, cast

import pytest

from kvhive.client import PrewarmOptions, Prompt
from kvhive.client.messages import prewarm_request
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts import prewarm_command
from kvhive.scripts.cluster_state import ClusterState
from kvhive.scripts.prewarm_command import Wanted

STATE = cast(ClusterState, SimpleNamespace(grpc="target"))
ANSWER = pb.PrewarmResponse(
    prompt_tokens=40,
    workers=[
        pb.Prewarmed(worker_id="w1", written_tokens=32, kept=True),
        pb.Prewarmed(worker_id="w2", pulled_tokens=32, not_kept="over_budget"),
    ],
)


class Client:
    """A client of a router that notes what it is asked."""

    asked: pb.PrewarmRequest

    def __init__(self, target: str, **options: object) -> None:
        self.target = target

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def prewarm(self, prompt: Prompt, **options: Unpack[PrewarmOptions]) -> pb.PrewarmResponse:
        type(self).asked = prewarm_request(prompt, options)
        return ANSWER


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    monkeypatch.setattr(prewarm_command, "Client", Client)
    monkeypatch.setattr(prewarm_command, "callers_key", lambda state: "")
    return Client


def test_with_a_time_each_worker_says_whether_it_keeps_it(
    client: type[Client], capsys: pytest.CaptureFixture[str]
) -> None:
    prewarm_command.run(STATE, Wanted("text", None, "salt", 2, ttl_s=90.5), as_json=False)
    assert client.asked == pb.PrewarmRequest(text="text", cache_salt="salt", workers=2, ttl_s=90.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("computed 32, kept for 90.5 s")
    assert second.endswith("computed 0, not kept: over_budget")


def test_without_one_nothing_is_said_of_it_and_nothing_asked(
    client: type[Client], capsys: pytest.CaptureFixture[str]
) -> None:
    prewarm_command.run(STATE, Wanted("question", "system", "", 1), as_json=False)
    assert not client.asked.HasField("ttl_s") and len(client.asked.chat.messages) == 2
    assert "kept" not in capsys.readouterr().out


def test_programs_read_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    prewarm_command.run(STATE, Wanted("text", None, "", 2, ttl_s=60.0), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["prompt_tokens"] == 40
    assert [(w["worker_id"], w["kept"], w["not_kept"]) for w in document["workers"]] == [
        ("w1", True, ""),
        ("w2", False, "over_budget"),
    ]
