"""An engine on a simulated model, driven step by step, with every token checked against the oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnly
from dataclasses import replace

from kvhive.proto.block_hash import namespace_extras, root_hash
from kvhive.proto.kv_events import KvEvent
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks, Output
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import Chunk, ChunkResult
from kvhive.worker.pins import PinBudget
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import Pin, SamplingParams, Sequence
from kvhive.worker.simulated_runner import SimulatedRunner

ROOT = root_hash(b"a model")
STEP_S = 0.01


class DraftingRunner(SimulatedRunner):
    """Guesses `max_drafts` tokens ahead, of which a random number are right."""

    drafter = random.Random(0)
    asked: ReadOnly[Chunk] = ()
    """The chunks of the last step."""

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Add drafts to the chunks that have room for them, then verify them."""
        self.asked = list(chunks)
        return super().run([self._guess(chunk) if chunk.max_drafts else chunk for chunk in chunks])

    def _guess(self, chunk: Chunk) -> Chunk:
        right, context, drafts = self.drafter.randint(0, chunk.max_drafts), list(chunk.history), []
        for index in range(chunk.max_drafts):
            token = self.next_token(context, chunk.sampling, chunk.prompt_tokens)
            drafts.append(token if index < right else (token + 1) % 900)
            context.append(drafts[-1])
        return replace(chunk, drafts=tuple(drafts))


class Rig:
    """One engine without threads: `run()` steps until it is idle. Its clock moves by STEP_S per step."""

    def __init__(
        self,
        blocks: int,
        block_size: int = 4,
        budget: int = 16,
        max_running: int = 8,
        max_waiting: int = 64,
        drafts: int = 0,
        pins: PinBudget | None = None,
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks, pins)
        self.manager = KvCacheManager(self.pool, block_size, ROOT, lambda: self.now)
        limits = SchedulerLimits(budget, max_running, max_waiting)
        self.scheduler = Scheduler(self.manager, limits, lambda seq: drafts)
        self.runner = DraftingRunner(blocks, block_size)
        self.outputs: dict[str, list[Output]] = {}
        self.events: list[KvEvent] = []
        hooks = EngineHooks(self._deliver, self._publish)
        self.engine = Engine(self.runner, self.scheduler, hooks, lambda: self.now)
        self.prompts: dict[str, list[int]] = {}
        self.sequences: dict[str, Sequence] = {}
        self._checked: dict[str, list[int]] = {}

    def submit(
        self,
        request_id: str,
        tokens: Iterable[int],
        max_tokens: int = 4,
        salt: str = "",
        stop: Iterable[int] = (),
        priority: int = 0,
        tenant: str = "",
        after: Sequence | None = None,
        moved: bool = False,
        pins: Iterable[tuple[int, float]] = (),
        **sampling: object,
    ) -> Sequence:
        tokens = list(tokens)
        self.prompts[request_id] = tokens
        seq = Sequence(
            request_id,
            list(tokens),
            len(tokens),
            SamplingParams(max_tokens, stop_token_ids=frozenset(stop), **sampling),
            extras=namespace_extras(salt),
            priority=priority,
            tenant=tenant,
            after=after,
            moved=moved,
            pins=tuple(Pin(*pin) for pin in pins),
        )
        self.sequences[request_id] = seq
        self.engine.submit(seq)
        return seq

    def choices(self, request_id: str, tokens: Iterable[int], n: int, **fields: object) -> list[Sequence]:
        """Submit n choices of one request, the first one leading."""
        tokens = list(tokens)
        first = self.submit(f"{request_id}/0", tokens, **fields)
        rest = [
            self.submit(f"{request_id}/{i}", tokens, after=first, choice=i, **fields) for i in range(1, n)
        ]
        return [first, *rest]

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if self.scheduler.idle and not self.engine._inbox:
                return
            self.step()
        if steps == 10_000:
            raise AssertionError("the engine did not come to rest")

    def step(self) -> None:
        self.engine.step()
        self.now += 1.0 if self.scheduler.waits_for_leases else STEP_S
        self.check()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, ()) for token in output.tokens]

    def cached(self, request_id: str) -> int:
        return self.outputs[request_id][0].cached_tokens

    def expected(self, request_id: str, length: int) -> list[int]:
        tokens = list(self.prompts[request_id])
        for _ in range(length):
            tokens.append(self.oracle(request_id, tokens))
        return tokens[-length:] if length else []

    def oracle(self, request_id: str, tokens: list[int]) -> int:
        seq = self.sequences.get(request_id)
        return self.runner.next_token(tokens, seq.sampling if seq else None, len(self.prompts[request_id]))

    def check(self) -> None:
        """The promises that hold after every step."""
        usage = self.pool.usage()
        assert usage.live + usage.cached + usage.free == usage.total
        held = Counter(block_id for seq in self.scheduler.running for block_id in seq.block_table)
        held += Counter(block.block_id for block in self.engine.desk.moves.held())
        assert usage.live == len(held), "every live block is held by a running sequence or a transfer"
        for block in self.pool.blocks:
            assert block.ref_count == held[block.block_id]
        leased = [block for block in self.pool.blocks if block.lease]
        assert usage.pinned == sum(block.ref_count == 0 for block in leased)
        assert usage.free + usage.cached - usage.pinned == self.pool.available
        leases, budget = self.pool.leases, self.pool.leases.budget
        assert leases.total == len(leased) <= usage.total * budget.share_in_all
        for tenant, count in Counter(block.lease.tenant for block in leased if block.lease).items():
            assert leases.held_by(tenant) == count <= usage.total * budget.share_per_tenant
        assert sum(not entry[3].ended for entry in leases._ends) <= len(leased)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            request_id = output.request_id
            self.outputs.setdefault(request_id, []).append(output)
            if request_id in self.prompts:
                context = self._checked.setdefault(request_id, list(self.prompts[request_id]))
                for token in output.tokens:
                    assert token == self.oracle(request_id, context), (
                        f"{request_id}: a block held the wrong tokens"
                    )
                    context.append(token)

    def _publish(self, events: Iterable[KvEvent]) -> None:
        self.events.extend(events)
