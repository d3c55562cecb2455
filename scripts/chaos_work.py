"""What a chaos run asks for: requests of many kinds whose answers are always the same, and those answers."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhive.proto.v1 import inference_pb2 as pb

TRUNKS = 6
TRUNK_TOKENS = 320
LONGEST_TAIL = 60
LONGEST_ANSWER = 80
KINDS = (
    "greedy",
    "seeded",
    "choices",
    "stop",
    "http",
    "http_choices",
    "http_whole",
    "logprobs",
    "penalties",
    "open",
)


@dataclass(frozen=True, slots=True)
class Work:
    """One request. The same one is asked many times, by different doors and under different faults."""

    number: int
    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    """0: not said, so as many as the context leaves room for."""
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: str = ""
    penalty: float = 0.0
    logprobs: bool = False
    salt: str = ""
    key: str = ""

    @property
    def by_http(self) -> bool:
        """Whether it goes through the HTTP door."""
        return self.kind.startswith("http")

    def grpc_request(self) -> pb.GenerateRequest:
        """Return it for the gRPC door."""
        sampling = pb.SamplingParams(
            max_tokens=self.max_tokens or None,
            temperature=self.temperature,
            seed=self.seed,
            stop=[self.stop] if self.stop else [],
            presence_penalty=self.penalty,
            ignore_eos=True,
        )
        if self.logprobs:
            sampling.logprobs = 2
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=sampling,
            cache_salt=self.salt,
            cache_key=self.key,
            n=self.n,
        )

    def http_body(self) -> dict[str, Any]:
        """Return it for POST /v1/completions."""
        stream = self.kind != "http_whole"
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "cache_salt": self.salt,
            "prompt_cache_key": self.key,
            "n": self.n,
            **({"stop": [self.stop]} if self.stop else {}),
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        }


@dataclass(slots=True)
class ChoiceSeen:
    """What has come of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    reason: str = ""


class Transcript:
    """What one attempt brought, piece by piece. What can never be right is noted at once in `problems`."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self.work = work
        self._clock = clock
        self.choices = [ChoiceSeen() for _ in range(work.n)]
        self.usages: list[tuple[int, int]] = []
        """(prompt tokens, completion tokens) of each usage that came."""
        self.problems: list[str] = []
        self.worker = ""
        """Who was named at its beginning, where that is told."""
        self.began = self.heard = clock()

    @property
    def silent_s(self) -> float:
        """Seconds since there was news, or since it began."""
        return self._clock() - self.heard

    @property
    def progress(self) -> str:
        """How far it has come, for who wonders why it has not ended."""
        tokens = [len(seen.tokens) for seen in self.choices]
        began = f"{self._clock() - self.began:.1f} s ago, first at {self.worker or 'nobody'}"
        return f"begun {began}; tokens {tokens}, silent for {self.silent_s:.1f} s"

    def delta(self, choice: int, text: str, tokens: Sequence[int] = (), logprobs: int = 0) -> None:
        """Add new output."""
        if not 0 <= choice < len(self.choices):
            self.problems.append(f"output of choice {choice} of {len(self.choices)}")
            return
        seen = self.choices[choice]
        if seen.reason:
            self.problems.append(f"choice {choice} goes on after its end")
        self.heard = self._clock()
        seen.text += text
        seen.tokens += tokens
        seen.logprobs += logprobs

    def finish(self, choice: int, reason: str) -> None:
        """A choice has ended."""
        if self.choices[choice].reason:
            self.problems.append(f"choice {choice} ends twice")
        self.choices[choice].reason = reason

    def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The usage of the whole request came."""
        self.usages.append((prompt_tokens, completion_tokens))

    @property
    def whole(self) -> bool:
        """Whether it is a complete answer, as far as one can say without knowing it."""
        if len(self.usages) != 1 or not all(seen.reason for seen in self.choices):
            return False
        [(prompt_tokens, completion_tokens)] = self.usages
        tokens = sum(len(seen.tokens) for seen in self.choices)
        return prompt_tokens == len(self.work.prompt) and (self.work.by_http or completion_tokens == tokens)

    def differences(self, expected: Transcript, complete: bool) -> list[str]:
        """Say how it differs from the answer that is expected, or cannot become it."""
        found = list(self.problems)
        for index, (seen, wanted) in enumerate(zip(self.choices, expected.choices, strict=True)):
            if complete and seen.reason != wanted.reason:
                found.append(f"choice {index} ends with {seen.reason!r} and not with {wanted.reason!r}")
            if not (seen.text == wanted.text if complete else wanted.text.startswith(seen.text)):
                found.append(f"choice {index} says {seen.text!r} and not {wanted.text!r}")
            if self.work.by_http:
                continue
            tokens = wanted.tokens if complete else wanted.tokens[: len(seen.tokens)]
            if seen.tokens != tokens:
                found.append(f"choice {index} has tokens {seen.tokens} and not {tokens}")
            if seen.logprobs != (len(seen.tokens) if self.work.logprobs else 0):
                found.append(f"choice {index} has {seen.logprobs} log-probabilities")
        if complete and self.usages != expected.usages:
            found.append(f"usage is {self.usages} and not {expected.usages}")
        if not complete and len(self.usages) > 1:
            found.append(f"usage came {len(self.usages)} times")
        return found


def make_work(seed: str, count: int, vocabulary: int, context: int) -> list[Work]:
    """Return `count` requests, the same for the same seed; their prompts share beginnings.

    Token ids are below `vocabulary`; a model has room for `context` tokens.
    """
    chance = random.Random(f"work {seed}")
    trunks = [_tokens(chance, TRUNK_TOKENS, vocabulary) for _ in range(TRUNKS)]
    made = []
    for number in range(count):
        kind, trunk = KINDS[number % len(KINDS)], chance.choice(trunks)
        beginning = trunk[: chance.randrange(0, len(trunk))]
        prompt = beginning + _tokens(chance, chance.randint(1, LONGEST_TAIL), vocabulary)
        work = Work(
            number,
            kind,
            tuple(prompt),
            max_tokens=chance.randint(8, LONGEST_ANSWER),
            salt=chance.choice(("", "", "a")),
            key=chance.choice(("", "", "k1", "k2")),
        )
        if kind == "open":
            room = len(prompt) + chance.randint(8, LONGEST_ANSWER)
            prompt = _tokens(chance, context - room, vocabulary) + prompt
            work = dataclasses.replace(work, prompt=tuple(prompt), max_tokens=0)
        made.append(dataclasses.replace(work, **_kind_fields(kind, chance)))
    return made


def stopped(work: Work, answer: Transcript) -> Work:
    """Return a request that ends in the middle of an answer, by a stop string found there."""
    text = answer.choices[0].text
    middle = len(text) // 2
    piece = "".join(c for c in text[middle : middle + 3] if c != "\ufffd")
    return dataclasses.replace(work, stop=piece) if piece else work


def _kind_fields(kind: str, chance: random.Random) -> Mapping[str, Any]:
    seeded = {"temperature": chance.choice((0.7, 1.0)), "seed": chance.getrandbits(32)}
    fields: dict[str, dict[str, Any]] = {
        "seeded": seeded,
        "choices": {**seeded, "n": 3},
        "http_choices": {**seeded, "n": 2},
        "logprobs": {"logprobs": True},
        "penalties": {**seeded, "penalty": 0.8},
    }
    return fields.get(kind, {})


def _tokens(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(1, vocabulary) for _ in range(count)]
