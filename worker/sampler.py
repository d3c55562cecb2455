"""From a step's logits to its results: sampling, verification of drafts, log-probabilities.

A draft is accepted exactly when it is the token that would have been sampled in its place. Sampling is a
function of (logits, options, history, seed, choice, position) alone, so drafts change no token. So is what a
grammar allows, a function of the history; all else is taken out of the logits before the options apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ReadOnly

import torch

from kvhive.kernels.logprobs import token_logprobs
from kvhive.kernels.penalties import PenaltyRow
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.sampling import SamplingRow, sample
from kvhive.kernels.token_filters import TokenFilters
from kvhive.proto.errors import InvalidRequest, KvhiveError
from kvhive.proto.json_schema import FIELD
from kvhive.worker.grammar_masks import Masks, allowed
from kvhive.worker.model_runner import Chunk, ChunkResult, TokenLogprobs
from kvhive.worker.output_matcher import Mask, OutputMatcher
from kvhive.worker.sequence import SamplingParams


def counts_history(params: SamplingParams) -> bool:
    """Whether sampling needs to know the tokens so far."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def logit_offsets(chunk: Chunk) -> range:
    """Return which of a chunk's tokens and drafts, counted from its first, need the logits after them."""
    last = len(chunk.token_ids) - 1
    if chunk.prompt_logprobs is None:
        return range(last, last + 1 + len(chunk.drafts)) if chunk.sampling else range(0)
    if chunk.sampling:
        return range(last + 1 + len(chunk.drafts))
    return range(last + (chunk.next_prompt_token is not None))


def read_results(
    logits: torch.Tensor, chunks: ReadOnly[Chunk], masks: Masks | None = None
) -> list[ChunkResult]:
    """Return what a step did for each chunk; matchers go on by the tokens that it answers.

    logits: the rows of `logit_offsets` of each chunk, one chunk after the other: [rows, vocab_size]
    masks: those of the chunks that have a grammar

    Drafts are all sampled at once, each as if those before it had been accepted, and then kept as far as
    they agree. A row that is not finite fails its chunk only where it is needed.
    """
    first_rows: list[int] = []
    sampled_rows: list[int] = []
    options: list[SamplingRow] = []
    count = 0
    for place, chunk in enumerate(chunks):
        offsets = logit_offsets(chunk)
        first_rows.append(count)
        if chunk.sampling is not None:
            start = count + len(chunk.token_ids) - 1 - offsets.start
            sampled_rows += range(start, start + 1 + len(chunk.drafts))
            options += _sampling_rows(chunk, chunk.sampling, masks.get(place) if masks else None)
        count += len(offsets)
    if count != logits.shape[0]:
        raise ValueError(f"logits: needs {count} rows, has {logits.shape[0]}")
    tokens = sample(logits if len(sampled_rows) == count else logits[sampled_rows], options)
    results, position = [], 0
    for chunk, first in zip(chunks, first_rows, strict=True):
        own: list[int | None] = []
        if chunk.sampling is not None:
            own = tokens[position : position + 1 + len(chunk.drafts)]
            position += len(own)
        results.append(_result(logits, chunk, first, own))
    return results


def _sampling_rows(chunk: Chunk, params: SamplingParams, masks: list[Mask] | None) -> Iterator[SamplingRow]:
    """How the token after the chunk and those after each of its drafts are sampled."""
    filters = TokenFilters(params.top_k, params.top_p, params.min_p, params.typical_p)
    counted = counts_history(params)
    history = torch.tensor([*chunk.history, *chunk.drafts]) if counted else None
    end = chunk.start + len(chunk.token_ids)
    for position in range(end, end + 1 + len(chunk.drafts)):
        early = position - chunk.prompt_tokens < params.min_tokens
        penalties = may = None
        if masks is not None and chunk.matcher is not None:
            may = allowed(masks[position - end], params, chunk.matcher.ends, early)
        if counted or params.logit_bias or (early and params.stop_token_ids) or may is not None:
            penalties = PenaltyRow(
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
                bias=params.logit_bias,
                forbidden=params.stop_token_ids if early and may is None else frozenset(),
                allowed=may,
                history=None if history is None else history[:position],
                prompt_tokens=chunk.prompt_tokens,
            )
        stream = NoiseStream(params.seed, params.choice, position)
        yield SamplingRow(params.temperature, filters, penalties, stream)


def _result(logits: torch.Tensor, chunk: Chunk, first: int, sampled: list[int | None]) -> ChunkResult:
    """Put one chunk's result together.

    first: the chunk's first row of `logits`
    sampled: the token after the chunk and after each draft
    """
    tokens, ends_at = _agreed(chunk, sampled)
    # Without drafts, the token before the row that is not finite would have been generated: so it is here.
    failed = bool(sampled) and not tokens
    reason = _grammar_failure(chunk.matcher, failed) if chunk.matcher is not None and sampled else None
    prompt = _prompt_logprobs(logits, chunk, first)
    if failed or reason is not None or prompt is None:
        return ChunkResult(failed=True, reason=reason)
    logprobs: list[TokenLogprobs] = []
    if chunk.sampling is not None and chunk.sampling.logprobs is not None:
        start = first + len(chunk.token_ids) - 1 - logit_offsets(chunk).start
        logprobs = _logprobs(logits, start, tokens, chunk.sampling.logprobs) or []
    return ChunkResult(
        tuple(tokens), tuple(logprobs), tuple(prompt), drafted=len(chunk.drafts), ends_at=ends_at
    )


def _agreed(chunk: Chunk, sampled: ReadOnly[int | None]) -> tuple[list[int], int]:
    """Return the sampled tokens up to the first that is not its draft, and ChunkResult's `ends_at`."""
    tokens: list[int] = []
    for token, draft in zip(sampled, [*chunk.drafts, None], strict=True) if sampled else ():
        if token is None:
            break
        tokens.append(token)
        if chunk.matcher is not None and chunk.matcher.take(token):
            return tokens, len(tokens)
        if token != draft:
            break
    return tokens, 0


def _grammar_failure(matcher: OutputMatcher, failed: bool) -> KvhiveError | None:
    """Why a chunk with a grammar cannot go on, if that is the grammar's doing."""
    if matcher.failure is not None or not failed:
        return matcher.failure
    return InvalidRequest(FIELD, "no token that the grammar allows next has a logit that is a number")


def _prompt_logprobs(logits: torch.Tensor, chunk: Chunk, first: int) -> list[TokenLogprobs] | None:
    """Log-probabilities of the prompt tokens that the chunk's rows speak of; None if one is not finite."""
    if chunk.prompt_logprobs is None:
        return []
    following = list(chunk.token_ids[1:])
    if chunk.next_prompt_token is not None:
        following.append(chunk.next_prompt_token)
    return _logprobs(logits, first, following, chunk.prompt_logprobs)


def _logprobs(
    logits: torch.Tensor, first: int, tokens: ReadOnly[int], top: int
) -> list[TokenLogprobs] | None:
    """Log-probabilities of `tokens` in the rows from `first`; None if a row is not finite."""
    result = []
    for row in token_logprobs(logits[first : first + len(tokens)], tokens, top):
        if row is None:
            return None
        result.append(TokenLogprobs(*row))
    return result
