"""How output is chosen and where it ends: the options of a request, their defaults and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES
from kvhive.proto.json_schema import FIELD
from kvhive.proto.limits import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
)
from kvhive.router.field_checks import check_above_zero, check_chars, check_range, check_text, check_token_ids

MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
"""Bounds the text that may have to be held back from a stream."""
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must be."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    """The schema as JSON, the expression, or the grammar in llguidance's dialect of Lark."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The defaults are those of `inference.proto`."""

    max_tokens: int | None = None
    """Most tokens to generate; None is as many as the context leaves room for (`resolve_max_tokens`)."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None is random."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    """Locally typical sampling; 1 keeps all tokens."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt or output; 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted once for each token in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); an id at most once."""
    min_tokens: int = 0
    """No end before this many tokens, neither by a token nor by a stop string."""
    logprobs: int | None = None
    """Report log-probabilities of output tokens, with so many alternatives; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; such a request takes nothing from the cache."""
    grammar: Grammar | None = None
    """None leaves the output free."""
    speculate: bool = True
    """Whether drafts may be tried; they never change what is generated."""


def check_sampling(sampling: SamplingParams, vocab_size: int, max_context: int) -> None:
    """Check each option alone, and min_tokens against a given max_tokens. Raises InvalidRequest."""
    if sampling.max_tokens is not None:
        check_range("max_tokens", sampling.max_tokens, 1, max_context)
    check_range("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    check_range("top_k", sampling.top_k, 0, MAX_TOP_K)
    check_above_zero("top_p", sampling.top_p, 1)
    check_range("min_p", sampling.min_p, 0, 1)
    check_above_zero("typical_p", sampling.typical_p, 1)
    check_above_zero("repetition_penalty", sampling.repetition_penalty, MAX_REPETITION_PENALTY)
    check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.seed is not None:
        check_range("seed", sampling.seed, 0, MAX_SEED)
    check_min_tokens(sampling.min_tokens, max_context if sampling.max_tokens is None else sampling.max_tokens)
    check_logprobs("logprobs", sampling.logprobs)
    check_logprobs("prompt_logprobs", sampling.prompt_logprobs)
    _check_logit_bias(sampling.logit_bias, vocab_size)
    _check_stops(sampling, vocab_size)
    if sampling.grammar is not None:
        _check_grammar(sampling.grammar)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Check that the output may be long enough. Raises InvalidRequest."""
    check_range("min_tokens", min_tokens, 0, max_tokens)


def check_logprobs(name: str, alternatives: int | None) -> None:
    """Check how many alternatives are asked for. Raises InvalidRequest."""
    if alternatives is not None:
        check_range(name, alternatives, 0, MAX_LOGPROBS)


def check_bias_count(count: int) -> None:
    """Check how many biases there are. Raises InvalidRequest."""
    if count > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest("logit_bias", f"must have at most {MAX_LOGIT_BIAS_ENTRIES} entries, has {count}")


def check_stop_counts(stops: int, token_ids: int) -> None:
    """Check how many stop strings and stop tokens there are. Raises InvalidRequest."""
    if stops > MAX_STOPS:
        raise InvalidRequest("stop", f"must be at most {MAX_STOPS} strings, is {stops}")
    if token_ids > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS} ids, is {token_ids}")


def _check_logit_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    check_bias_count(len(logit_bias))
    for token_id, bias in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                "logit_bias", f"token ids must be between 0 and {vocab_size - 1}, one is {token_id}"
            )
        check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_grammar(grammar: Grammar) -> None:
    """Check what takes no time; grammar.py does the rest."""
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidRequest(FIELD, f"must be one of {', '.join(GRAMMAR_KINDS)}, is {grammar.kind[:40]!r}")
    check_text(FIELD, grammar.text)
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(FIELD, f"must be at most {MAX_GRAMMAR_BYTES} bytes, is {size}")
    if grammar.kind == "json_object" and grammar.text:
        raise InvalidRequest(FIELD, "must have no schema where any JSON object will do")


def _check_stops(sampling: SamplingParams, vocab_size: int) -> None:
    check_stop_counts(len(sampling.stop), len(sampling.stop_token_ids))
    for index, stop in enumerate(sampling.stop):
        if not stop:
            raise InvalidRequest(f"stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters, is empty")
        check_chars(f"stop[{index}]", stop, MAX_STOP_CHARS)
    if sampling.stop_token_ids:
        check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
