"""What a generation asks of its next worker: one request for all choices, or one for each that goes on."""

from __future__ import annotations

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.v1 import worker_pb2
from kvhive.router.generation import Choice, Generation
from kvhive.router.pins import worker_pins
from kvhive.router.placement import Placement
from kvhive.router.sampling_params import Grammar


def worker_requests(
    generation: Generation, placement: Placement, queue_timeout_s: float
) -> list[worker_pb2.WorkerGenerateRequest]:
    """Return the requests that bring all unfinished choices to their end.

    Choices that have no tokens yet run as one group, which shares the prompt. Later each goes on from its
    own tokens, as a request of its own; noise is a function of seed, choice and position, so nothing changes.
    """
    if generation.untouched:
        group = _request(generation, placement, queue_timeout_s)
        group.n = len(generation.choices)
        return [group]
    return [_resumed(generation, choice, placement, queue_timeout_s) for choice in generation.unfinished]


def _resumed(
    generation: Generation, choice: Choice, placement: Placement, queue_timeout_s: float
) -> worker_pb2.WorkerGenerateRequest:
    request, done = _request(generation, placement, queue_timeout_s), choice.output.token_ids
    request.request_id += f"-{choice.index}"
    request.n, request.first_choice = 1, choice.index
    request.token_ids += pack_tokens(done)
    request.resumed_tokens = len(done)
    request.sampling.max_tokens -= len(done)
    request.sampling.ClearField("prompt_logprobs")  # they came before the first token
    return request


def _request(
    generation: Generation, placement: Placement, queue_timeout_s: float
) -> worker_pb2.WorkerGenerateRequest:
    sampling = generation.request.sampling
    return worker_pb2.WorkerGenerateRequest(
        worker_id=placement.worker_id,
        source=_source(placement),
        request_id=generation.wire_id,
        token_ids=generation.prompt.packed,
        cache_salt=generation.request.cache_salt,
        queue_timeout_s=queue_timeout_s,
        priority=generation.request.priority,
        tenant=generation.request.tenant,
        moved=generation.failovers > 0 or not generation.untouched,
        pins=[
            worker_pb2.WorkerPin(tokens=tokens, ttl_s=ttl_s)
            for tokens, ttl_s in worker_pins(generation.pins).items()
        ],
        sampling=worker_pb2.WorkerSampling(
            max_tokens=generation.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=dict(sampling.logit_bias),
            seed=generation.seed,
            stop_token_ids=generation.stop_token_ids,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            speculate=sampling.speculate,
            grammar=_grammar(sampling.grammar),
        ),
    )


def _grammar(grammar: Grammar | None) -> worker_pb2.Grammar | None:
    return None if grammar is None else worker_pb2.Grammar(kind=grammar.kind, text=grammar.text)


def _source(placement: Placement) -> worker_pb2.BlockSource | None:
    source = placement.source
    if source is None:
        return None
    return worker_pb2.BlockSource(
        worker_id=source.worker_id, address=source.address, epoch=source.epoch, blocks=source.blocks
    )
