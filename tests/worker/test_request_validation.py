"""A wire request becomes one sequence per choice, with everything that it asked for."""

from __future__ import annotations

from kvhive.proto.block_hash import namespace_extras, pack_tokens
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.request_validation import choice_of, to_sequences
from kvhive.worker.sequence import Pin, SamplingParams

SHAPE = ModelShape(1000, 8192, 1, 1, 1, 4)


def request(**fields: object) -> worker_pb2.WorkerGenerateRequest:
    sampling = worker_pb2.WorkerSampling(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        stop_token_ids=[4, 5],
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2,
        logit_bias={8: -100, 7: 1.5},
        min_tokens=3,
        logprobs=0,
        prompt_logprobs=2,
        speculate=True,
    )
    pins = [worker_pb2.WorkerPin(tokens=2, ttl_s=60)]
    whole: dict[str, object] = {"request_id": "a/b", "n": 1, "token_ids": pack_tokens([1, 2, 3])} | fields
    return worker_pb2.WorkerGenerateRequest(
        sampling=sampling, pins=pins, priority=-3, tenant="t", cache_salt="s", **whole
    )


def test_every_option_arrives() -> None:
    (seq,) = to_sequences(request(), SHAPE)
    assert seq.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2,
        logit_bias=((7, 1.5), (8, -100)),
        seed=2**64 - 1,
        choice=0,
        min_tokens=3,
        stop_token_ids=frozenset({4, 5}),
        logprobs=0,
        prompt_logprobs=2,
        speculate=True,
    )
    assert (seq.priority, seq.tenant, seq.pins) == (-3, "t", (Pin(2, 60),))
    assert (seq.tokens, seq.prompt_tokens, seq.max_total) == ([1, 2, 3], 3, 12)
    assert seq.extras == namespace_extras("s")


def test_choices_follow_the_first_one() -> None:
    """They share its prompt, and leave to it what concerns the prompt alone."""
    leader, *others = to_sequences(request(n=3, first_choice=2), SHAPE)
    assert leader.after is None and all(seq.after is leader for seq in others)
    assert [choice_of(seq.request_id) for seq in (leader, *others)] == [("a/b", 2), ("a/b", 3), ("a/b", 4)]
    assert [seq.sampling.choice for seq in others] == [3, 4]
    assert all(seq.pins == () and seq.sampling.prompt_logprobs is None for seq in others)
    others[0].tokens.append(9)
    assert leader.tokens == others[1].tokens == [1, 2, 3], "each has tokens of its own"


def test_what_an_earlier_worker_generated_is_output() -> None:
    """So penalties and min_tokens count it, and what is still to come is max_tokens."""
    (seq,) = to_sequences(request(token_ids=pack_tokens([1, 2, 3, 4, 5]), resumed_tokens=2), SHAPE)
    assert (seq.prompt_tokens, seq.max_total, seq.sampling.min_tokens) == (3, 14, 3)
