"""Random traffic on one engine, and the pool's promises, which hold whatever happens."""

from __future__ import annotations

from engine_rig import ROOT, Rig
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from kvhive.proto.block_chain import extend_chain
from kvhive.proto.block_hash import BlockHash, block_key
from kvhive.worker.scheduler import MAX_PREEMPTIONS
from kvhive.worker.sequence import SequenceState

BLOCK = 4
PREFIXES = [list(range(base, base + 14)) for base in (0, 100, 200)]


class PoolAccounting(RuleBasedStateMachine):
    """Random traffic over shared prefixes in a pool that is too small for it."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.held: set[bytes] = set()
        self.parents: dict[BlockHash, BlockHash] = {}
        self.leased_until: dict[BlockHash, float] = {}

    @initialize(
        blocks=st.sampled_from([16, 20, 28, 40]),
        budget=st.sampled_from([3, 10, 32]),
        drafts=st.integers(0, 4),
    )
    def start(self, blocks: int, budget: int, drafts: int) -> None:
        self.rig = Rig(blocks, BLOCK, budget, max_running=5, max_waiting=10, drafts=drafts)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 14),
        tail=st.lists(st.integers(300, 302), max_size=6),
        max_tokens=st.integers(1, 60),
        salt=st.sampled_from(["", "s"]),
        n=st.sampled_from([1, 1, 2, 3]),
        who=st.tuples(st.integers(-1, 1), st.sampled_from(["a", "b", "c"])),
        pins=st.sampled_from([[], [], [(8, 0.5)], [(14, 5.0)], [(4, 300.0), (12, 20.0)]]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def submit(
        self,
        prefix: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        salt: str,
        n: int,
        who: tuple[int, str],
        pins: list[tuple[int, float]],
        prompt_logprobs: int | None,
    ) -> None:
        self.serial += 1
        prompt = prefix[:length] + tail
        self.rig.choices(
            f"r{self.serial}",
            prompt,
            n,
            max_tokens=max_tokens,
            salt=salt,
            priority=who[0],
            tenant=who[1],
            pins=[(min(tokens, len(prompt)), ttl_s) for tokens, ttl_s in pins],
            prompt_logprobs=prompt_logprobs,
        )

    @rule(back=st.integers(0, 8), choice=st.integers(0, 2))
    def cancel(self, back: int, choice: int) -> None:
        self.rig.engine.cancel(f"r{self.serial - back}/{choice}")

    @rule()
    def clear(self) -> None:
        self.rig.engine.clear_cache(lambda count: None)
        self.leased_until.clear()

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds

    @rule(steps=st.integers(1, 60))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.scheduler.idle and not self.rig.engine._inbox:
                break
            self.rig.step()
            self.remember_leases()

    @invariant()
    def accounting_is_exact(self) -> None:
        """free + cached + live = pool; ref counts equal holders; one hash is one block."""
        self.rig.check()
        pool = self.rig.pool
        registered = [block for block in pool.blocks if block.block_hash is not None]
        assert len({block.block_hash for block in registered}) == len(registered) == len(pool._by_hash)
        assert all(pool.lookup(block.block_hash) is block for block in registered if block.block_hash)

    @invariant()
    def events_tell_exactly_what_is_registered(self) -> None:
        """Replaying the events gives the hash map; none is stored twice or removed when absent."""
        for event in self.rig.events:
            if event.cause is None:
                assert event.key not in self.held
                self.held.add(event.key)
            else:
                self.held.remove(event.key)
        self.rig.events.clear()
        pending = {e.key: e.cause for e in self.rig.pool._events}
        known = {block_key(h) for h in self.rig.pool._by_hash}
        assert {k for k in self.held | set(pending) if pending.get(k) is None} == known

    @invariant()
    def the_cache_is_prefix_closed(self) -> None:
        """No block is registered without its parent, so a match is a length; no draft was registered."""
        for request_id, seq in self.rig.sequences.items():
            true_tokens = self.rig._checked.get(request_id, self.rig.prompts[request_id])
            chain: list[BlockHash] = []
            extend_chain(chain, ROOT, true_tokens, BLOCK, seq.extras)
            self.parents.update(zip(chain[1:], chain, strict=False))
            if chain:
                self.parents[chain[0]] = ROOT
        for block_hash in self.rig.pool._by_hash:
            assert self.parents[block_hash] is ROOT or self.parents[block_hash] in self.rig.pool._by_hash

    def remember_leases(self) -> None:
        """A block whose lease has been seen stays findable until the lease ends."""
        for block in self.rig.pool.blocks:
            if block.lease and block.block_hash:
                until = max(block.lease.ends_at, self.leased_until.get(block.block_hash, 0.0))
                self.leased_until[block.block_hash] = until
        # The lease that ends during a step may end at that step's beginning.
        self.leased_until = {h: t for h, t in self.leased_until.items() if t > self.rig.now}
        for block_hash in self.leased_until:
            assert self.rig.pool.lookup(block_hash) is not None, "evicted before its lease ended"

    def teardown(self) -> None:
        if self.serial:
            self.rig.run()
            self.rig.check()
            type(self).steps += self.rig.engine.steps
            assert self.rig.pool.usage().live == 0 and not self.rig.scheduler.waiting._held
            assert not self.rig.scheduler._shares._active
            for request_id, seq in self.rig.sequences.items():
                assert seq.preemptions <= MAX_PREEMPTIONS
                if seq.state is SequenceState.FINISHED and seq.finish_reason.name == "LENGTH":
                    assert len(self.rig.tokens(request_id)) == seq.sampling.max_tokens
                    told = sum(len(output.prompt_logprobs) for output in self.rig.outputs[request_id])
                    asked = seq.sampling.prompt_logprobs is not None
                    assert told == (seq.prompt_tokens - 1 if asked else 0)
