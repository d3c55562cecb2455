"""A stateful property test: whatever is submitted, cancelled and cleared, the pool's promises hold."""

from __future__ import annotations

from engine_rig import ROOT, Rig
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhive.proto.block_hash import block_key, hash_chain, namespace_extras

BLOCK = 4
PREFIXES = [list(range(base, base + 14)) for base in (0, 100, 200)]


class PoolAccounting(RuleBasedStateMachine):
    """Random traffic over shared prefixes in a pool that is too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(blocks=20, block_size=BLOCK, budget=10, max_running=4, max_waiting=8)
        self.serial = 0
        self.held: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 14),
        tail=st.lists(st.integers(300, 302), max_size=6),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "s"]),
    )
    def submit(self, prefix: list[int], length: int, tail: list[int], max_tokens: int, salt: str) -> None:
        self.serial += 1
        self.rig.submit(f"r{self.serial}", prefix[:length] + tail, max_tokens, salt)

    @rule(back=st.integers(0, 8))
    def cancel(self, back: int) -> None:
        self.rig.engine.cancel(f"r{self.serial - back}")

    @rule()
    def clear(self) -> None:
        self.rig.engine.clear_cache(lambda count: None)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        self.rig.run(steps=steps)

    @invariant()
    def accounting_is_exact(self) -> None:
        """free + cached + live = pool; ref counts equal holders; outputs equal the oracle's."""
        self.rig.check()
        pool = self.rig.pool
        registered = [block for block in pool.blocks if block.block_hash is not None]
        assert len({block.block_hash for block in registered}) == len(registered)
        assert all(pool.lookup(block.block_hash) is block for block in registered if block.block_hash)
        assert len(pool._by_hash) == len(registered)

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
        """No block is registered without its parent, so a match is a length."""
        for seq in [*self.rig.scheduler.running, *self.rig.scheduler.waiting]:
            for parent, child in zip(seq.hashes, seq.hashes[1:], strict=False):
                self.parents[child] = parent
        for prefix in PREFIXES:
            for salt in ("", "s"):
                chain = hash_chain(ROOT, prefix, BLOCK, namespace_extras(salt))
                self.parents.update(zip(chain[1:], chain, strict=False))
        for block_hash in self.rig.pool._by_hash:
            parent = self.parents.get(block_hash)
            assert parent is None or parent in self.rig.pool._by_hash

    def teardown(self) -> None:
        self.rig.run()
        usage = self.rig.pool.usage()
        assert usage.live == 0 and usage.free + usage.cached == usage.total


PoolAccounting.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAccounting = PoolAccounting.TestCase
