"""Answers that follow a grammar, through the whole engine: always valid, and the same however computed."""

from __future__ import annotations

import json

import jsonschema
import pytest
from grammar_rig import FINISHING, following, matcher, spoken
from grammar_vocabulary import CONTROL, END, TINY
from real_engine import RealEngine, request, tiny_model

from kvhive.proto.errors import InvalidRequest
from kvhive.worker.sequence import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["one", "zwei", "三", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 40}, "maxItems": 4},
        "next": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"type": "boolean"}}}]},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
FILTERED = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.95,
}
PROMPT = list(range(40, 77))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_model(folder / "target", 2, 1), tiny_model(folder / "draft", 1, 2)


def requests(count, **sampling):
    options = {"temperature": 1.0, "logit_bias": FINISHING, "logprobs": 2, **sampling}
    return [
        following(f"r{seed}", PROMPT[: 20 + seed], 200, "json_schema", SCHEMA, seed=seed, **options)
        for seed in range(count)
    ]


def ends(engine, seqs):
    return [engine.sequences[seq.request_id].finish_reason for seq in seqs]


def test_every_answer_is_valid_and_stops(models):
    engine, seqs = RealEngine(models[0], 200, 64), requests(6)
    for tokens in engine.run(*seqs):
        jsonschema.validate(json.loads(spoken(tokens)), SCHEMA)
    assert ends(engine, seqs) == [FinishReason.STOP] * 6


@pytest.mark.parametrize(
    ("draft", "options"),
    [("ngram", {}), ("draft", FILTERED), ("self", {"temperature": 0.0}), ("self", {})],
    ids=["ngram", "draft", "greedy self", "self"],
)
def test_speculation_changes_no_token_and_no_logprob(models, draft, options):
    seqs = requests(4, **options)
    plain = RealEngine(models[0], 200, 64)
    expected = plain.run(*seqs)
    small = models[0] if draft == "self" else models[1]
    engine = RealEngine(models[0], 200, 64, "ngram" if draft == "ngram" else "draft", small)
    assert engine.run(*seqs) == expected
    assert ends(engine, seqs) == ends(plain, seqs)
    for seq in seqs:
        ours, theirs = ([p.logprob for p in each.logprobs(seq.request_id)] for each in (engine, plain))
        assert ours == pytest.approx(theirs, abs=1e-4)
    if draft == "self":  # the draft model keeps to the grammar as the target does
        # But for an answer's last token, which ends it whether it was a draft or not.
        assert engine.scheduler.accepted >= engine.scheduler.drafted - len(seqs) > 0


def test_batch_mates_chunks_and_preemption_change_nothing(models):
    seqs = requests(5)
    expected = RealEngine(models[0], 200, 64).run_cold(*seqs)
    cramped = RealEngine(models[0], 14, 8)
    free = request("free", PROMPT, 60, temperature=1.0, seed=9)
    assert cramped.run(*seqs, free)[:-1] == expected
    assert cramped.scheduler.preemptions > 0
    assert cramped.tokens("free") == RealEngine(models[0], 200, 64).run(free)[0]


def test_another_worker_goes_on_from_any_token(models):
    engine = RealEngine(models[0], 200, 64)
    (seq,) = requests(1)
    (tokens,) = engine.run(seq)
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        moved = requests(1)[0]
        moved.tokens += tokens[:cut]
        moved.matcher.follow(tokens[:cut])
        assert RealEngine(models[0], 200, 64).run(moved) == [tokens[cut:]]


def test_drafts_the_vocabulary_does_not_have_end_the_drafting_and_not_the_answer():
    following_ab = matcher("regex", "ab+")
    size = len(TINY.tokens)
    assert following_ab.allows([*b"abb", size, *b"b"]) == 3
    assert following_ab.allows([size + 1]) == following_ab.allows([]) == 0
    assert following_ab.failure is None and following_ab.allows(b"ab!") == 2


def test_what_an_earlier_worker_generated_must_be_of_the_grammar():
    with pytest.raises(InvalidRequest, match="response_format: token 33 at 2"):
        matcher("regex", "ab+").follow(b"ab!")


def test_the_log_probabilities_are_the_models_own(models):
    engine = RealEngine(models[0], 200, 64)
    (seq,) = requests(1)
    (tokens,) = engine.run(seq)
    own = [position.logprob for position in engine.logprobs("r0")]
    whole = request("scored", [*seq.tokens, *tokens], 1, prompt_logprobs=0)
    engine.run(whole)
    scored = [p.logprob for output in engine.outputs["scored"] for p in output.prompt_logprobs]
    assert own == pytest.approx(scored[-len(tokens) :], abs=1e-4)


@pytest.mark.parametrize(
    ("grammar", "options", "text", "reason"),
    [
        ("ab|abc", {"logit_bias": ((END, 100.0),)}, "ab", "stop"),  # it may end, and would like to
        ("ab|abc", {"logit_bias": ((END, 100.0),), "min_tokens": 3}, "abc", "stop"),
        ("ab", {"min_tokens": 9}, "ab", "stop"),  # the grammar goes first
        ("ab+", {"logit_bias": ((END, 100.0),), "stop_token_ids": frozenset()}, "ab" + "b" * 18, "length"),
        ("ab", {"stop_token_ids": frozenset()}, "ab", "stop"),
        ("abcd", {"stop_token_ids": frozenset(b"b")}, "ab", "stop"),  # the caller's own
        ("", {}, "", "stop"),
        ("(a|b){5}", {"logit_bias": ((CONTROL, 100.0), (299, 100.0), (ord("b"), 50.0))}, "bbbbb", "stop"),
    ],
)
def test_where_it_ends(models, grammar, options, text, reason):
    options = {"logit_bias": ((ord("b"), 50.0),), **options}
    engine = RealEngine(models[0], 50, 64)
    seq = following("r", PROMPT, 20, "regex", grammar, **options)
    (tokens,) = engine.run(seq)
    assert spoken(tokens) == text
    assert ends(engine, [seq]) == [FinishReason[reason.upper()]]


def test_a_grammar_that_cannot_go_on_ends_its_own_answer_only(models):
    engine = RealEngine(models[0], 200, 64)
    good, bad = requests(2)
    bad.matcher.inner.consume_token(ord("!"))  # as one of the library's limits would
    heard = []
    deliver = engine.engine._hooks.deliver
    object.__setattr__(
        engine.engine._hooks,
        "deliver",
        lambda outputs: (
            heard.extend(output for output in outputs if output.error),
            deliver([output for output in outputs if not output.error]),
        ),
    )
    tokens, nothing = engine.run(good, bad)
    jsonschema.validate(json.loads(spoken(tokens)), SCHEMA)
    assert not nothing
    assert [type(output.error) for output in heard] == [InvalidRequest]
    assert heard[0].request_id == "r1"
