"""Prefixes are found, shared and registered exactly: which blocks, when, and for whom."""

from __future__ import annotations

from engine_rig import Rig

from kvhive.proto.errors import InvalidRequest


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
    """Six at once, three cancelled, no garbage left under any hash, also when the pool is then filled."""
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
    for i in range(10):
        rig.submit(f"other{i}", range(100 * i, 100 * i + 30), max_tokens=2)
    rig.run()
    rig.submit("evicted", range(12), max_tokens=8)
    rig.run()
    assert rig.cached("evicted") == 0
    assert rig.tokens("evicted") == rig.expected("evicted", 8)


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


def test_a_long_prefix_survives_prompts_shorter_than_a_block() -> None:
    """60 of them, alone and eight at once, in a pool of 40: they take turns on the blocks nobody can hit."""
    rig = Rig(blocks=40)
    prefix = range(500, 533)
    rig.submit("warm", prefix, max_tokens=1)
    rig.run()
    for i in range(60):
        rig.submit(f"short{i}", [i, 1], max_tokens=2)
        if i % 2:
            rig.run()
    for i in range(60, 68):
        rig.submit(f"short{i}", [i, 1], max_tokens=2)
    rig.run()
    rig.submit("again", prefix)
    rig.run()
    assert rig.cached("again") == 32


def test_one_block_too_few_costs_a_prefix_its_last_block_and_no_more() -> None:
    """A pool of one request and nothing else, 20 times: the blocks before the evicted one all hit."""
    rig = Rig(blocks=7)
    prefix = range(500, 525)
    rig.submit("warm", prefix, max_tokens=2)
    rig.run()
    for i in range(20):
        rig.submit(f"fits{i}", [i, 2], max_tokens=2)
        rig.run()
        rig.submit(f"whole{i}", prefix, max_tokens=2)
        rig.run()
        assert rig.cached(f"whole{i}") == 24, "the seventh block was enough"
        rig.submit(f"needs two{i}", [i, 1, 2, 3, 4], max_tokens=1)
        rig.run()
        rig.submit(f"cut{i}", prefix, max_tokens=2)
        rig.run()
        assert rig.cached(f"cut{i}") == 20


def test_two_hundred_requests_of_every_end_leave_the_pool_as_it_was() -> None:
    """Finished, stopped, cancelled, failed, refused, n of 2: nothing is live, and the next one is served."""
    rig = Rig(blocks=24, max_waiting=400)
    for i in range(200):
        tokens = [i, *range(i % 7 + 1)]
        rig.prompts["probe"] = tokens
        match i % 6:
            case 0:
                rig.submit(f"r{i}", tokens, max_tokens=5)
            case 1:
                rig.submit(f"r{i}", tokens, max_tokens=9, stop=rig.expected("probe", 3)[2:])
            case 2:
                rig.submit(f"r{i}", tokens, max_tokens=50)
            case 3:
                rig.submit(f"r{i}", [*tokens, rig.runner.POISON])
            case 4:
                rig.submit(f"r{i}", tokens, max_tokens=500)
            case 5:
                rig.choices(f"r{i}", tokens, n=2, max_tokens=6)
        rig.run(steps=i % 3)
        if i % 6 == 2:
            rig.engine.cancel(f"r{i}")
    rig.run()
    ends = {seq.finish_reason.name for seq in rig.sequences.values() if seq.finish_reason}
    assert ends == {"LENGTH", "STOP", "CANCELLED", "FAILED"}
    assert sum(isinstance(outputs[-1].error, InvalidRequest) for outputs in rig.outputs.values()) == 33
    usage = rig.pool.usage()
    assert (usage.live, usage.free + usage.cached) == (0, 24)
    assert rig.engine.load.accounting_errors == 0
    rig.submit("next", range(700, 790), max_tokens=6)
    rig.run()
    assert rig.tokens("next") == rig.expected("next", 6)
