"""A worker's door and grammars: compiled aside, before the engine sees the request, and refused in words."""

from __future__ import annotations

import asyncio
import gc
import threading

import grpc
import pytest
from grammar_vocabulary import TINY
from real_engine import request
from redis_fixtures import eventually
from worker_rig import METADATA, WorkerRig, running_worker

from kvhive.proto.errors import ModelError
from kvhive.proto.grammar import MAX_GRAMMAR_BYTES
from kvhive.proto.token_vocabulary import TokenVocabulary
from kvhive.proto.v1 import worker_pb2
from kvhive.worker import grammar_desk
from kvhive.worker.sequence import Grammar


def asked(
    worker: WorkerRig, name: str, kind: str = "regex", text: str = "a*", **fields: object
) -> worker_pb2.WorkerGenerateRequest:
    sampling = worker_pb2.WorkerSampling(grammar=worker_pb2.Grammar(kind=kind, text=text))
    return worker.request(name, [1, 2, 3], sampling=sampling, **fields)


async def refusal(worker: WorkerRig, request: worker_pb2.WorkerGenerateRequest) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await worker.generate(request)
    return error.value.code().name, error.value.details() or ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "xml"}, "must be one of json_object, json_schema, regex, lark"),
        ({"text": "a(", "n": 3}, "invalid regex"),
        ({"kind": "json_schema", "text": '{"not": {}}'}, "not"),
        ({"text": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES} bytes"),
        ({"resumed_tokens": 2}, "token 2 at 0 of the output is not of the grammar"),
    ],
)
async def test_what_cannot_be_followed_is_refused(fields: dict[str, object], message: str) -> None:
    async with running_worker() as worker:
        status, details = await refusal(worker, asked(worker, "bad", **fields))  # type: ignore[arg-type]
        assert status == "INVALID_ARGUMENT" and details.startswith("response_format: ") and message in details
        assert worker.service.open_streams == 0
        await worker.generate(asked(worker, "good", n=2))
        await worker.idle()


@pytest.mark.parametrize("reason", [ModelError("no tokenizer.json"), ImportError("llguidance")])
async def test_without_a_vocabulary_others_are_served(reason: Exception) -> None:
    def load() -> TokenVocabulary:
        raise reason

    async with running_worker(vocabulary=load) as worker:
        status, details = await refusal(worker, asked(worker, "one"))
        assert status == "INTERNAL" and str(reason) in details
        await worker.generate(worker.request("two", [1, 2, 3]))
        await worker.idle()


async def test_without_an_end_there_is_no_grammar() -> None:
    async with running_worker(vocabulary=lambda: TokenVocabulary(TINY.tokens, TINY.special, ())) as worker:
        assert "no token by which an output ends" in (await refusal(worker, asked(worker, "one")))[1]


async def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others are served meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    compiles = grammar_desk.new_matcher

    def slow(*of: object) -> object:
        begun.set()
        go_on.wait(30)
        return compiles(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_desk, "new_matcher", slow)
    async with running_worker() as worker:
        call = worker.stub.Generate(asked(worker, "gone"), metadata=METADATA)
        await eventually(begun.is_set)
        await worker.generate(worker.request("other", [4, 5, 6]))
        call.cancel()
        await eventually(lambda: worker.service.open_streams == 0)
        go_on.set()
        await worker.generate(asked(worker, "next"))  # compiled after the other one, in the same thread
        await worker.idle()
        assert worker.engine.load.admitted == 2


async def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compiles = grammar_desk.new_matcher

    def count(tokenizer: object, kind: str, text: str) -> object:
        compiled.append(text)
        return compiles(tokenizer, kind, text)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_desk, "new_matcher", count)
    monkeypatch.setattr(grammar_desk, "MAX_COMPILED", 2)
    async with running_worker() as worker:
        for number, text in enumerate(("a", "b", "a", "c", "a", "b")):
            await worker.generate(asked(worker, f"r{number}", text=text, n=2))
        await worker.idle()
    assert compiled == ["a", "b", "c", "b"]


async def test_what_nobody_wants_any_more_fails_without_a_word_in_the_log() -> None:
    """asyncio complains of failures that nobody has asked for."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    desk, looked = grammar_desk.GrammarDesk(None), asyncio.Event()

    def wanted() -> bool:
        looked.set()
        return False

    seq = request("gone", [1, 2, 3], 4, grammar=Grammar("regex", "a*"))
    desk.begin([seq], lambda seq: None, lambda output: complaints.append(output), wanted)
    await asyncio.wait_for(looked.wait(), 30)
    await asyncio.sleep(0)
    gc.collect()
    desk.close()
    assert complaints == []
