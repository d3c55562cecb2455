"""An engine without threads on real (if tiny) weights: scheduler, pool, runner and speculation as served."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import torch

from kvhive.proto.block_hash import namespace_extras, root_hash
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.draft_model import DraftModel
from kvhive.worker.engine import Engine, EngineHooks, Output
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import ModelRunner, TokenLogprobs
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.speculative_runner import SpeculativeRunner
from kvhive.worker.torch_runner import TorchModelRunner

VOCABULARY = 300
CONTEXT = 512
BLOCK = 16


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
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def request(
    name: str, tokens: Iterable[int], max_tokens: int, salt: str = "", **sampling: object
) -> Sequence:
    """A request, greedy unless `sampling` says otherwise."""
    tokens, options = list(tokens), SamplingParams(max_tokens, **sampling)  # type: ignore[arg-type]
    return Sequence(name, tokens, len(tokens), options, extras=namespace_extras(salt))


class RealEngine:
    """`run()` steps until it is idle. Speculates with `draft` "ngram", or "draft" and a draft model."""

    def __init__(
        self,
        model: Path,
        blocks: int,
        budget: int,
        draft: str = "off",
        draft_model: Path | None = None,
        kv_dtype: str = "auto",
        target: TorchModelRunner | None = None,
    ) -> None:
        ticks = count()

        def clock() -> float:
            return float(next(ticks))

        target = target or load_runner(model, num_blocks=blocks, block_size=BLOCK, kv_dtype=kv_dtype)
        runner: ModelRunner = target
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
        self.sequences: dict[str, Sequence] = {}
        hooks = EngineHooks(self._deliver, lambda events: None)
        self.engine = Engine(runner, self.scheduler, hooks, clock)

    def submit(self, seq: Sequence) -> None:
        """Hand in a fresh copy of a request."""
        name = seq.request_id
        self.outputs.pop(name, None)
        self.sequences[name] = Sequence(
            name, list(seq.tokens), seq.prompt_tokens, seq.sampling, extras=seq.extras
        )
        self.sequences[name].matcher = seq.matcher and seq.matcher.fork()
        self.engine.submit(self.sequences[name])

    def run(self, *requests: Sequence) -> list[list[int]]:
        """Run fresh copies of some requests together to their end; return their tokens."""
        for seq in requests:
            self.submit(seq)
        for _ in range(20_000):
            self.engine.step()
            if self.scheduler.idle:
                break
        usage = self.pool.usage()
        assert (usage.live, usage.free + usage.cached) == (0, usage.total)
        return [self.tokens(seq.request_id) for seq in requests]

    def run_cold(self, *requests: Sequence) -> list[list[int]]:
        """Run each alone, with nothing cached: what every other way must equal."""
        tokens = []
        for seq in requests:
            self.pool.clear()
            tokens += self.run(seq)
            assert self.cached(seq.request_id) == 0
        return tokens

    def tokens(self, name: str) -> list[int]:
        """What one request generated so far."""
        return [token for output in self.outputs.get(name, ()) for token in output.tokens]

    def logprobs(self, name: str) -> list[TokenLogprobs]:
        """The log-probabilities of that."""
        return [logprob for output in self.outputs[name] for logprob in output.logprobs]

    def cached(self, name: str) -> int:
        """How many of its tokens were found in the pool."""
        return self.outputs[name][0].cached_tokens

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            self.outputs.setdefault(output.request_id, []).append(output)
