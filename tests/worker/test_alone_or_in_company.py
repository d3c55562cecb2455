"""216 random requests get the tokens they would get alone on a fresh engine.

Whatever their company, the chunk size, a pool that is too small for all of them, speculation, cached
prefixes and preemption: a request's tokens are a function of the request.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from kvhive.proto.block_hash import namespace_extras, root_hash
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.draft_model import DraftModel
from kvhive.worker.engine import Engine, EngineHooks, Output
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.speculative_runner import SpeculativeRunner

VOCABULARY = 300
BLOCK = 16
TIGHT_BLOCKS = 12
"""For up to 8 requests of up to 12 blocks each: the pool is never large enough for all."""
CHUNK_SIZES = (16, 64, 512)
SPECULATION = ("off", "ngram", "draft")
CASES = [(chunk, speculation) for chunk in CHUNK_SIZES for speculation in SPECULATION]
PER_CASE = 24


def tiny_model(folder: Path, layers: int, seed: int) -> Path:
    """A random Llama whose logits spread enough to be far from ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and a draft that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_model(folder / "target", 2, 1), tiny_model(folder / "draft", 1, 1)


class Company:
    """An engine without threads on real (if tiny) weights."""

    def __init__(
        self, model: Path, blocks: int, budget: int, draft: str = "off", draft_model: Path | None = None
    ):
        ticks = count()

        def clock() -> float:
            return float(next(ticks))

        runner = target = load_runner(model, num_blocks=blocks, block_size=BLOCK)
        drafts_for: Callable[[Sequence], int] = lambda seq: 0  # noqa: E731
        if draft != "off":
            if draft == "ngram":
                drafter = NgramDrafter(2, 4)
            else:
                assert draft_model is not None
                small = load_runner(draft_model, num_blocks=blocks, block_size=BLOCK)
                drafter = DraftModel(small, target.shape, blocks, BLOCK, 512)
            runner = SpeculativeRunner(target, drafter, clock)
            drafts_for = lambda seq: 3 if seq.sampling.speculate else 0  # noqa: E731
        target.pool.fill_(torch.nan)  # whatever is read before it is written shows
        self.pool = BlockPool(blocks)
        manager = KvCacheManager(self.pool, BLOCK, root_hash(b"tiny"), clock)
        self.scheduler = Scheduler(manager, SchedulerLimits(budget, 8, 1000), drafts_for)
        self.outputs: dict[str, list[Output]] = {}
        hooks = EngineHooks(self._deliver, lambda events: None)
        self.engine = Engine(runner, self.scheduler, hooks, clock)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, requests: dict[str, Sequence]) -> dict[str, list[int]]:
        """Run fresh copies of some requests to their end; return their tokens."""
        self.outputs.clear()
        for name, seq in requests.items():
            self.engine.submit(
                Sequence(name, list(seq.tokens), seq.prompt_tokens, seq.sampling, extras=seq.extras)
            )
        for _ in range(20_000):
            self.engine.step()
            if self.scheduler.idle:
                break
        usage = self.pool.usage()
        assert (usage.live, usage.free + usage.cached) == (0, usage.total)
        return {name: [t for output in self.outputs[name] for t in output.tokens] for name in requests}


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
    tokens: dict[str, list[int]] = {}
    company = Company(models[0], blocks=64, budget=512)
    for name, seq in requests.items():
        company.pool.clear()
        tokens |= company.run({name: seq})
    return tokens


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
    company = Company(models[0], TIGHT_BLOCKS, chunk, speculation, models[1])
    first, different = CASES.index((chunk, speculation)) * PER_CASE, []
    names = list(requests)[first : first + PER_CASE]
    for start in range(0, PER_CASE, 8):
        batch = {name: requests[name] for name in names[start : start + 8]}
        for _ in ("cold", "warm"):
            got = company.run(batch)
            different += [name for name in batch if got[name] != alone[name]]
    assert different == []
    assert company.scheduler.prefix_hits > 0
    hardships.update(
        cases=1,
        preemptions=company.scheduler.preemptions,
        accepted=company.scheduler.accepted,
        rejected=company.scheduler.drafted - company.scheduler.accepted,
    )
