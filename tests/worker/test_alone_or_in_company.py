"""216 random requests get the tokens they would get alone on a fresh engine.

Whatever their company, the chunk size, a pool that is too small for all of them, speculation, cached
prefixes and preemption: a request's tokens are a function of the request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_engine import VOCABULARY, RealEngine, tiny_model

from kvhive.proto.block_hash import namespace_extras
from kvhive.worker.sequence import SamplingParams, Sequence

TIGHT_BLOCKS = 12
"""For up to 8 requests of up to 12 blocks each: the pool is never large enough for all."""
CHUNK_SIZES = (16, 64, 512)
SPECULATION = ("off", "ngram", "draft")
CASES = [(chunk, speculation) for chunk in CHUNK_SIZES for speculation in SPECULATION]
PER_CASE = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and a draft that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_model(folder / "target", 2, 1), tiny_model(folder / "draft", 1, 1)


def random_request(rng: random.Random, name: str) -> Sequence:
    """Prompts share beginnings, some repeat themselves; all options appear, alone and together."""
    base = [(7 * i + 3) % VOCABULARY for i in range(rng.choice((0, 16, 40)))]
    unit = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
    tokens = base + (unit * 12)[: rng.randrange(1, 120)]
    sampled = rng.random() < 0.7
    sampling = SamplingParams(
        max_tokens=rng.randrange(1, 30),
        temperature=rng.choice((0.3, 0.8, 1.5)) if sampled else 0.0,
        top_k=rng.choice((0, 0, 5, 50)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        typical_p=rng.choice((1.0, 1.0, 0.8)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        presence_penalty=rng.choice((0.0, 0.0, -0.5, 1.0)),
        logit_bias=((rng.randrange(VOCABULARY), 3.0),) if rng.random() < 0.2 else (),
        seed=rng.getrandbits(64),
        choice=rng.choice((0, 0, 1, 5)),
        min_tokens=0,
        stop_token_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 0, 5, 30)))),
        speculate=rng.random() < 0.8,
    )
    sampling = replace(sampling, min_tokens=rng.choice((0, 0, sampling.max_tokens // 2)))
    return Sequence(name, tokens, len(tokens), sampling, extras=namespace_extras(rng.choice(("", "", "s"))))


@pytest.fixture(scope="module")
def requests() -> dict[str, Sequence]:
    """24 for each case."""
    rng = random.Random(20)
    return {f"r{i}": random_request(rng, f"r{i}") for i in range(PER_CASE * len(CASES))}


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path], requests: dict[str, Sequence]) -> dict[str, list[int]]:
    """Each request on an engine of its own: nothing cached, nobody beside it, one chunk, no drafts."""
    engine = RealEngine(models[0], blocks=64, budget=512)
    return dict(zip(requests, engine.run_cold(*requests.values()), strict=True))


@pytest.fixture(scope="module")
def hardships() -> Iterator[Counter[str]]:
    """What the cases met on their way; together they must have met everything."""
    met: Counter[str] = Counter()
    yield met
    if met["cases"] == len(CASES):
        assert min(met["preemptions"], met["accepted"], met["rejected"]) > 0, met


@pytest.mark.parametrize(("chunk", "speculation"), CASES)
def test_the_tokens_are_those_of_the_request_alone(
    models: tuple[Path, Path],
    requests: dict[str, Sequence],
    alone: dict[str, list[int]],
    hardships: Counter[str],
    chunk: int,
    speculation: str,
) -> None:
    """In rounds of 8 at once, cold and then warm; not one needs a tie to be excused."""
    company = RealEngine(models[0], TIGHT_BLOCKS, chunk, speculation, models[1])
    first, different = CASES.index((chunk, speculation)) * PER_CASE, []
    names = list(requests)[first : first + PER_CASE]
    for start in range(0, PER_CASE, 8):
        batch = names[start : start + 8]
        for _ in ("cold", "warm"):
            got = company.run(*(requests[name] for name in batch))
            different += [name for name, tokens in zip(batch, got, strict=True) if tokens != alone[name]]
    assert different == []
    assert company.scheduler.prefix_hits > 0
    hardships.update(
        cases=1,
        preemptions=company.scheduler.preemptions,
        accepted=company.scheduler.accepted,
        rejected=company.scheduler.drafted - company.scheduler.accepted,
    )
