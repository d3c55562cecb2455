"""An engine on a simulated model, driven step by step, with every token checked against the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from kvhive.proto.block_hash import namespace_extras, root_hash
from kvhive.proto.kv_events import KvEvent
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks, Output
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.simulated_runner import SimulatedRunner

ROOT = root_hash(b"a model")


class Rig:
    """One engine without threads: `run()` steps until it is idle."""

    def __init__(
        self, blocks: int, block_size: int = 4, budget: int = 16, max_running: int = 8, max_waiting: int = 64
    ) -> None:
        ticks = count()
        self.pool = BlockPool(blocks)
        self.manager = KvCacheManager(self.pool, block_size, ROOT, lambda: float(next(ticks)))
        self.scheduler = Scheduler(self.manager, SchedulerLimits(budget, max_running, max_waiting))
        self.runner = SimulatedRunner(blocks, block_size)
        self.outputs: dict[str, list[Output]] = {}
        self.events: list[KvEvent] = []
        self.engine = Engine(
            self.runner, self.scheduler, EngineHooks(self._deliver, self._publish), lambda: float(next(ticks))
        )
        self.prompts: dict[str, list[int]] = {}

    def submit(
        self,
        request_id: str,
        tokens: Iterable[int],
        max_tokens: int = 4,
        salt: str = "",
        stop: Iterable[int] = (),
    ) -> Sequence:
        sampling = SamplingParams(max_tokens, stop_token_ids=frozenset(stop))
        tokens = list(tokens)
        self.prompts[request_id] = tokens
        seq = Sequence(request_id, list(tokens), len(tokens), sampling, extras=namespace_extras(salt))
        self.engine.submit(seq)
        return seq

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if self.scheduler.idle and not self.engine._inbox:
                return
            self.engine.step()
            self.check()
        if steps == 10_000:
            raise AssertionError("the engine did not come to rest")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, ()) for token in output.tokens]

    def cached(self, request_id: str) -> int:
        return self.outputs[request_id][0].cached_tokens

    def expected(self, request_id: str, length: int) -> list[int]:
        tokens = list(self.prompts[request_id])
        for _ in range(length):
            tokens.append(self.runner.next_token(tokens))
        return tokens[-length:] if length else []

    def check(self) -> None:
        """The promises that hold after every step."""
        usage = self.pool.usage()
        assert usage.live + usage.cached + usage.free == usage.total
        held = [block_id for seq in self.scheduler.running for block_id in seq.block_table]
        assert usage.live == len(set(held)), "every live block is held by a running sequence"
        for block in self.pool.blocks:
            assert block.ref_count == held.count(block.block_id)
        for request_id in self.outputs:
            got = self.tokens(request_id)
            assert got == self.expected(request_id, len(got)), f"{request_id}: a block held the wrong tokens"

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def _publish(self, events: Iterable[KvEvent]) -> None:
        self.events.extend(events)
