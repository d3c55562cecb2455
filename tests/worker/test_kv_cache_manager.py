"""Prefixes are found, shared and registered exactly: which blocks, when, and for whom."""

from __future__ import annotations

from engine_rig import Rig


def test_a_second_prompt_reuses_the_full_shared_blocks_only() -> None:
    """|P| = 2.5 blocks, so exactly 2 are shared and nothing of the tail leaks."""
    rig = Rig(blocks=32)
    prefix = list(range(10))
    rig.submit("a", [*prefix, 100, 101])
    rig.run()
    rig.submit("b", [*prefix, 200, 201])
    rig.run()
    assert (rig.cached("a"), rig.cached("b")) == (0, 8)


def test_the_prefix_is_shared_while_the_first_still_decodes() -> None:
    rig = Rig(blocks=32)
    first = rig.submit("a", range(10), max_tokens=20)
    rig.run(steps=3)
    second = rig.submit("b", [*range(8), 50, 51], max_tokens=20)
    rig.run(steps=1)
    assert second.cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert rig.pool.blocks[first.block_table[0]].ref_count == 2
    rig.run()


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    rig = Rig(blocks=32)
    for request_id in ("a", "b"):
        rig.submit(request_id, range(8), max_tokens=1)
        rig.run()
    assert rig.cached("b") == 4


def test_another_salt_shares_nothing_and_the_same_salt_does() -> None:
    """The positive control: the request that comes again under its own salt does hit."""
    rig = Rig(blocks=64)
    for request_id, salt in (("a", "s1"), ("b", "s2"), ("c", ""), ("d", "s1")):
        rig.submit(request_id, range(12), salt=salt)
        rig.run()
    assert [rig.cached(i) for i in "abcd"] == [0, 0, 0, 8]


def test_a_hash_is_registered_only_after_its_kv_is_written() -> None:
    """A prefill that is cancelled half-way leaves behind exactly the blocks it computed."""
    rig = Rig(blocks=32, budget=8)
    rig.submit("a", range(32))
    rig.run(steps=2)
    rig.engine.cancel("a")
    rig.run()
    assert rig.pool.usage().cached == 4
    rig.submit("b", range(32))
    rig.run()
    assert rig.cached("b") == 16


def test_identical_prompts_in_one_batch_end_up_on_one_copy() -> None:
    """Six at once, three cancelled, no garbage left under any hash."""
    rig = Rig(blocks=64, budget=64)
    seqs = [rig.submit(f"r{i}", range(12), max_tokens=8) for i in range(6)]
    rig.run(steps=2)
    assert len({tuple(seq.block_table[:3]) for seq in seqs}) == 1
    for i in range(3):
        rig.engine.cancel(f"r{i}")
    rig.run()
    rig.submit("again", range(12))
    rig.run()
    assert rig.cached("again") == 8


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    rig = Rig(blocks=64)
    rig.submit("turn1", range(6), max_tokens=8)
    rig.run()
    history = [*range(6), *rig.tokens("turn1")]
    rig.submit("turn2", [*history, 7, 7])
    rig.run()
    # The last generated token was sampled but never computed: 13 of the 14 are in the pool, 3 full blocks.
    assert rig.cached("turn2") == 12


def test_written_tokens_count_full_prompt_blocks_that_were_new() -> None:
    rig = Rig(blocks=64)
    rig.submit("a", range(10))
    rig.run()
    rig.submit("b", [*range(8), *range(100, 110)])
    rig.run()
    assert [rig.outputs[i][0].written_tokens for i in "ab"] == [8, 8]


def test_two_prompts_that_evict_each_other_never_claim_what_is_gone() -> None:
    """20 rounds in a pool that holds one of the two."""
    rig = Rig(blocks=10)
    for round_ in range(20):
        for name, base in (("a", 0), ("b", 500)):
            rig.submit(f"{name}{round_}", range(base, base + 32), max_tokens=2)
            rig.run()
            assert rig.cached(f"{name}{round_}") <= 4  # what the other had to leave: at most one block
