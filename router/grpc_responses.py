"""The router's events and usage as messages of kvhive.v1, none of them large."""

from __future__ import annotations

from collections.abc import Iterator

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.frontend import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    KeptPrefix,
    Started,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

MAX_POSITIONS = 1024
"""Prompt log-probabilities of one message, each with up to 20 alternatives: some 250 kB, where clients take
4 MiB unless they say otherwise, and a long prompt has more."""

_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


def generate_responses(event: GenerationEvent) -> Iterator[pb.GenerateResponse]:
    """Translate one event of a generation; a delta with much in it becomes several."""
    match event:
        case Started(request_id, worker_id, prompt_tokens):
            started = pb.Started(request_id=request_id, worker_id=worker_id, prompt_tokens=prompt_tokens)
            yield pb.GenerateResponse(started=started)
        case Delta():
            for delta in _deltas(event):
                yield pb.GenerateResponse(delta=delta)
        case Finished(reason, usage, choice, stop):
            finished = pb.Finished(reason=_REASONS[reason], choice=choice, stop=stop)
            if usage is not None:
                finished.usage.CopyFrom(_usage(usage))
            yield pb.GenerateResponse(finished=finished)


def prewarm_response(usages: list[Usage]) -> pb.PrewarmResponse:
    """Say what a prompt took at each worker that holds it now."""
    return pb.PrewarmResponse(prompt_tokens=usages[0].prompt_tokens, workers=map(_prewarmed, usages))


def _deltas(event: Delta) -> Iterator[pb.Delta]:
    for start in range(0, len(event.prompt_logprobs), MAX_POSITIONS):
        positions = event.prompt_logprobs[start : start + MAX_POSITIONS]
        yield pb.Delta(choice=event.choice, prompt_logprobs=map(_logprobs, positions))
    if event.text or event.token_ids or event.tool_calls:
        yield pb.Delta(
            text=event.text,
            token_ids=event.token_ids,
            choice=event.choice,
            logprobs=map(_logprobs, event.logprobs),
            tool_calls=map(_tool_call, event.tool_calls),
        )


def _tool_call(more: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=more.index, id=more.id, name=more.name, arguments=more.arguments)


def _logprobs(position: TokenLogprobs) -> pb.Logprobs:
    top = [pb.TokenAlternative(token_id=token_id, logprob=logprob) for token_id, logprob in position.top]
    return pb.Logprobs(logprob=position.logprob, top=top)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reachable_tokens=usage.reachable_tokens,
        written_tokens=usage.written_tokens,
        worker_id=usage.worker_id,
        route_reason=usage.route_reason,
        failovers=usage.failovers,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        pulled_tokens=usage.pulled_tokens,
        kept=map(_kept, usage.kept),
        not_kept=usage.not_kept,
    )


def _prewarmed(usage: Usage) -> pb.Prewarmed:
    return pb.Prewarmed(
        worker_id=usage.worker_id,
        cached_tokens=usage.cached_tokens,
        pulled_tokens=usage.pulled_tokens,
        written_tokens=usage.written_tokens,
        kept=bool(usage.kept) and not usage.not_kept,
        not_kept=usage.not_kept,
    )


def _kept(prefix: KeptPrefix) -> pb.KeptPrefix:
    return pb.KeptPrefix(tokens=prefix.tokens, ttl_s=prefix.ttl_s, kept=prefix.kept)
