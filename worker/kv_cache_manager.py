"""Gives sequences their blocks: finds cached prefixes, grows block tables, registers what was computed."""

from __future__ import annotations

from collections.abc import Callable

from kvhive.proto.block_chain import extend_chain
from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.sequence import Sequence


class KvCacheManager:
    """Sequences on one side, blocks on the other. All times are in seconds of `clock`."""

    def __init__(self, pool: BlockPool, block_size: int, root: BlockHash, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.block_size = block_size
        self.clock = clock
        self._root = root

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def usable(self, seq: Sequence) -> list[BlockHash]:
        """Return the hashes of the leading blocks of a sequence that it need not compute itself.

        At least the last token is left to compute, since its logits are needed: a prompt of exactly n full
        blocks uses at most n - 1. None while the logits of the prompt itself are needed.
        """
        if seq.wants_prompt_logprobs:
            return []
        extend_chain(seq.hashes, self._root, seq.tokens, self.block_size, seq.extras)
        return seq.hashes[: (len(seq.tokens) - 1) // self.block_size]

    def match(self, seq: Sequence) -> list[Block]:
        """Return the registered blocks of the longest cached prefix of a sequence, as far as it is usable."""
        matched: list[Block] = []
        for block_hash in self.usable(seq):
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            matched.append(block)
        return matched

    def fits(self, seq: Sequence, num_tokens: int, reserved: int) -> bool:
        """Whether a sequence without blocks could hold `num_tokens` tokens and leave `reserved` blocks."""
        matched = self.match(seq)
        evictable_matched = sum(block.evictable for block in matched)
        needed = self.blocks_for(num_tokens) - len(matched)
        return needed + reserved <= self.pool.available - evictable_matched

    @property
    def tokens_beside_pins(self) -> int:
        """Tokens that the pool holds beside all that is pinned, in use or not."""
        return (len(self.pool.blocks) - self.pool.leases.total) * self.block_size

    def kept_out_by_pins(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a sequence could not hold `num_tokens` tokens even if nothing ran, for idle pins."""
        room = len(self.pool.blocks) - self.pool.usage().pinned
        if self.blocks_for(num_tokens) <= room:
            return False
        own = sum(block.ref_count == 0 and block.lease is not None for block in self.match(seq))
        return self.blocks_for(num_tokens) - own > room

    def admit(self, seq: Sequence) -> None:
        """Give a sequence without blocks its cached prefix."""
        assert not seq.block_table, f"{seq.request_id} admitted with blocks"
        matched = self.match(seq)
        for block in matched:
            self.pool.acquire(block)
        seq.block_table = [block.block_id for block in matched]
        seq.registered = len(matched)
        seq.num_computed = len(matched) * self.block_size
        if seq.cached_tokens is None:  # not a return after preemption: those tokens are not a hit
            # Neither is what another choice of the same request has computed, nor what was pulled for it.
            pulled = len(range(seq.arrived.start, min(seq.arrived.stop, len(matched))))
            seq.pulled_tokens = pulled * self.block_size
            seq.cached_tokens = seq.num_computed - seq.pulled_tokens if seq.after is None else 0

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the block table by room for `num_tokens` tokens; False when the pool is exhausted."""
        missing = self.blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
        if missing > self.pool.available:
            return False
        if missing > 0:
            seq.block_table.extend(block.block_id for block in self.pool.allocate(missing))
        return True

    def commit(self, seq: Sequence) -> None:
        """Register the full blocks whose KV is written. Called after the step that wrote it, never before."""
        full = seq.num_computed // self.block_size
        if full == seq.registered:
            return
        extend_chain(seq.hashes, self._root, seq.tokens, self.block_size, seq.extras)
        parent = self.pool.blocks[seq.block_table[seq.registered - 1]] if seq.registered else None
        for index in range(seq.registered, full):
            block = self.pool.blocks[seq.block_table[index]]
            parent = holder = self.pool.register(block, seq.hashes[index], parent)
            if holder is not block:
                self._replace(seq, index, block, holder)
            elif (index + 1) * self.block_size <= seq.prompt_tokens and seq.after is None:
                seq.written_tokens += self.block_size
        seq.registered = full

    def pin(self, seq: Sequence) -> None:
        """Pin what a sequence asks for: each of its pins whole, the longest ones left out that do not fit.

        Its prompt is computed. O(blocks) for each pin that is left out, and once for the others.
        """
        wanted = sorted((pin.tokens // self.block_size, pin.ttl_s) for pin in seq.pins if pin.ttl_s > 0)
        while wanted and wanted[-1][0]:
            chain = [self.pool.blocks[block_id] for block_id in seq.block_table[: wanted[-1][0]]]
            refusal = self.pool.pin(chain, _longest_of(wanted), seq.tenant, self.clock())
            if refusal is None:
                break
            seq.pins_refused = refusal
            wanted.pop()
        seq.pinned_tokens = wanted[-1][0] * self.block_size if wanted else 0

    def trim(self, seq: Sequence) -> None:
        """Take back the blocks beyond a sequence's tokens, which it got for drafts."""
        now, kept = self.clock(), self.blocks_for(len(seq.tokens))
        while len(seq.block_table) > kept:
            self.pool.release(self.pool.blocks[seq.block_table.pop()], now)

    def _replace(self, seq: Sequence, index: int, duplicate: Block, holder: Block) -> None:
        # Two sequences computed the same block: both go on with the first, so one hash is one block, and
        # a sequence that holds a registered block always holds the registered blocks before it.
        self.pool.acquire(holder)
        self.pool.release(duplicate, self.clock())
        seq.block_table[index] = holder.block_id

    def release(self, seq: Sequence) -> None:
        """Take all blocks back, last first. What was registered stays cached; the rest is free."""
        now = self.clock()
        for block_id in reversed(seq.block_table):
            self.pool.release(self.pool.blocks[block_id], now)
        seq.block_table = []
        seq.registered = 0
        seq.num_computed = 0


def _longest_of(pins: list[tuple[int, float]]) -> list[float]:
    """Return for each block the longest time that pins, shorter ones first, ask for it."""
    ttls: list[float] = []
    longest = 0.0
    for place in range(len(pins) - 1, -1, -1):
        blocks, ttl_s = pins[place]
        before = pins[place - 1][0] if place else 0
        longest = max(longest, ttl_s)
        ttls += [longest] * (blocks - before)
    return ttls[::-1]
