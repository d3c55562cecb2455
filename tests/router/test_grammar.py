"""What an output is asked to be is refused before anybody computes where it cannot be, in bounded time."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.proto.grammar import MAX_GRAMMAR_BYTES, new_matcher
from kvhive.proto.token_vocabulary import make_tokenizer
from kvhive.router import grammar as module
from kvhive.router.grammar import GrammarCheck
from kvhive.router.grammar_process import COMPILE_CPU_S
from kvhive.router.sampling_params import Grammar, SamplingParams, check_sampling
from kvhive.router.token_vocabulary import token_vocabulary
from kvhive.router.tokenizer import TextTokenizer

FINE = [
    Grammar(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(250)}}),
    ),
    Grammar("json_object"),
    Grammar("json_schema", '{"type": "integer"}'),
    Grammar("regex", "(a+)+b?"),
    Grammar("lark", 'start: "a" | "(" start ")"'),
    Grammar("lark", 'start: <|im_start|> "a"'),
]


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


HARD = schema({"type": "integer", "multipleOf": 1_000_003})
"""For this the library itself takes minutes."""
BAD = {
    "regex": Grammar("regex", "a("),
    "look-ahead": Grammar("regex", "a(?=b)"),
    "back reference": Grammar("regex", r"(a)\1"),
    "deep regex": Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "deep lark": Grammar("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "lark": Grammar("lark", "start: ("),
    "nothing": Grammar("lark", "start: start"),
    "no such token": Grammar("lark", "start: <|no_such_token|>"),
    "circle": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "alternatives": schema(
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 100 + i}]} for i in range(18)]}
    ),
    "optional properties": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}}
    ),
    "keyword": schema({"not": {}}),
    "values": schema({"enum": list(range(10_001))}),
    "passed over": Grammar("lark", 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'),
}


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@pytest.fixture(scope="module")
def check(tokenizer: TextTokenizer) -> GrammarCheck:
    return GrammarCheck(tokenizer)


async def test_what_can_be_followed_passes(check: GrammarCheck) -> None:
    for grammar in FINE:
        await check.check(grammar)


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_followed_is_refused_and_the_next_one_passes(
    check: GrammarCheck, name: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^response_format: ") as refusal:
            await check.check(BAD[name])
        assert len(str(refusal.value)) < 400 and "\n" not in str(refusal.value)
    await check.check(Grammar("regex", f"a|{name}"))


async def test_what_has_no_end_is_given_up_while_the_loop_goes_on_and_not_tried_twice(
    check: GrammarCheck,
) -> None:
    trial = asyncio.create_task(check.check(HARD))
    turns = 0
    while not trial.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 5
    with pytest.raises(InvalidRequest, match=f"takes more than {COMPILE_CPU_S} s of computing"):
        await trial
    with pytest.raises(InvalidRequest):
        check.check(HARD).send(None)  # without waiting for anything
    await check.check(Grammar("json_object"))


async def test_a_lost_process_is_said_and_begun_again(tokenizer: TextTokenizer) -> None:
    check = GrammarCheck(tokenizer)
    await check.check(Grammar("regex", "a"))
    assert check._process is not None
    os.kill(check._process.pid, signal.SIGSTOP)
    trial = asyncio.create_task(check.check(Grammar("regex", "b")))
    await asyncio.sleep(0.05)
    os.kill(check._process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="process was lost"):
        await trial
    await check.check(Grammar("regex", "b"))  # which is nobody's verdict yet
    pid = check._process.pid
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    await check.check(Grammar("regex", "c"))
    check._forget()


async def test_a_process_begun_among_thousands_of_open_files_answers(tokenizer: TextTokenizer) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:  # as many as a select knows
            held.append(os.open(os.devnull, os.O_RDONLY))
        check = GrammarCheck(tokenizer)
        await check.check(Grammar("regex", "a"))
        check._forget()
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_an_answer_left_unread_is_not_taken_for_the_next_one(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GrammarCheck(tokenizer)
    await check.check(Grammar("regex", "a"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_answer", lambda pipe: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await check.check(BAD["regex"])
    await check.check(Grammar("regex", "b"))
    check._forget()


async def test_only_so_many_wait_for_their_trial(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNTRIED", 3)
    asked = [check.check(Grammar("regex", f"x{number}")) for number in range(5)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 3 + [Overloaded] * 2


async def test_so_many_verdicts_are_kept(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VERDICTS", 2)
    check = GrammarCheck(tokenizer)
    tried: list[str] = []
    monkeypatch.setattr(check, "_try", lambda grammar: tried.append(grammar.text) or "")
    for text in "abacab":
        await check.check(Grammar("regex", text))
    assert tried == ["a", "b", "c", "b"]
    await check.check(Grammar("lark", "b"))
    assert tried[4:] == ["b"]
    await check.check(Grammar("regex", "é" * 60_000))
    assert max(map(sys.getsizeof, check._verdicts)) < 200


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("xml"), "must be one of json_object, json_schema, regex, lark, is 'xml'"),  # type: ignore[arg-type]
        (Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), f"at most {MAX_GRAMMAR_BYTES} bytes"),
        (Grammar("regex", "\ud800"), "lone surrogate"),
        (Grammar("json_object", "{}"), "must have no schema"),
    ],
)
def test_cheap_bounds_come_first(grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^response_format: .*{message}"):
        check_sampling(SamplingParams(grammar=grammar), 100, 100)


def test_a_vocabulary_has_the_text_of_each_token(tokenizer: TextTokenizer) -> None:
    vocabulary = token_vocabulary(tokenizer)
    assert len(vocabulary.tokens) == tokenizer.vocab_size
    assert set(vocabulary.ends) == tokenizer.eos_token_ids <= set(vocabulary.special)
    ids = tokenizer.encode('{"name": "Ünïcode 日本"}', add_special_tokens=False)
    assert b"".join(vocabulary.tokens[i] for i in ids) == '{"name": "Ünïcode 日本"}'.encode()
    matcher = new_matcher(make_tokenizer(vocabulary), "json_schema", '{"type": "object"}')
    assert matcher.consume_tokens(ids) and matcher.is_stopped()
