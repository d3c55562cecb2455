"""Every head, inner dimension and token belongs to a rank, whatever the numbers; the rest is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_models import tiny

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.model_config import read_model_config
from kvhive.worker.shard import Part, Shard, check_can_shard

HEADS = [(1, 1), (2, 1), (8, 8), (9, 3), (12, 2), (12, 4), (14, 2), (15, 5), (32, 8), (64, 8), (7, 7)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = tmp_path_factory.mktemp("model")
    tiny("Llama").save_pretrained(folder)
    read = read_model_config(folder)
    assert isinstance(read, DecoderConfig)
    return read


def assert_covers(parts: list[Part], total: int) -> None:
    """One after the other, none empty, none larger than another by more than one step."""
    assert parts[0].first == 0 and parts[-1].first + parts[-1].count == total
    assert all(one.first + one.count == two.first for one, two in pairwise(parts))
    assert all(part.count > 0 and part.total == total for part in parts)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_each_query_head_has_one_rank_and_its_kv_head_is_there(
    config: DecoderConfig, heads: int, kv_heads: int
) -> None:
    model = replace(config, heads=heads, kv_heads=kv_heads)
    for ranks in range(1, heads + 1):
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        queries = [shard.queries(model) for shard in shards]
        assert_covers(queries, heads)
        for own, shard in zip(queries, shards, strict=True):
            keys, local = shard.keys(model), shard.local(model)
            # As attention counts: query i of the rank reads its KV head i // group.
            group = local.heads // local.kv_heads
            assert local.heads == group * local.kv_heads
            for query in range(own.count):
                assert keys.first + query // group == (own.first + query) // (heads // kv_heads)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("inner", "step"), [(96, 16), (1536, 16), (90, 1), (112, 16), (7, 1)])
def test_the_inner_dimension_is_cut_at_whole_vectors_where_it_can_be(
    config: DecoderConfig, inner: int, step: int, ranks: int
) -> None:
    model = replace(config, intermediate_size=inner)
    parts = [Shard(rank, ranks).inner(model) for rank in range(ranks)]
    assert_covers(parts, inner)
    if inner // step >= ranks:
        assert all(part.first % step == part.count % step == 0 for part in parts)


@pytest.mark.parametrize("vocabulary", [5, 101, 128, 49152])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_each_token_has_one_rank_and_all_have_equally_many_rows(
    config: DecoderConfig, vocabulary: int, ranks: int
) -> None:
    model = replace(config, vocab_size=vocabulary)
    parts = [Shard(rank, ranks).vocabulary(model) for rank in range(ranks)]
    assert len({part.count for part in parts}) == 1
    own = [token for part in parts for token in range(vocabulary)[part.own]]
    assert own == list(range(vocabulary))
    assert all(part.first == rank * part.count for rank, part in enumerate(parts))


def test_more_ranks_than_the_model_has_parts_are_refused_by_name(config: DecoderConfig) -> None:
    here = Path("model")
    check_can_shard(config, config.heads, here)
    with pytest.raises(ModelError, match=r"tensor_parallel: must be at most the model's heads, 4, is 5"):
        check_can_shard(config, 5, here)
    with pytest.raises(ModelError, match=r"at most the model's intermediate_size, 3, is 4"):
        check_can_shard(replace(config, intermediate_size=3), 4, here)


def test_a_model_that_transformers_computes_is_refused_by_name(tmp_path: Path) -> None:
    tiny("GPTNeoX").save_pretrained(tmp_path)
    other = read_model_config(tmp_path)
    check_can_shard(other, 1, tmp_path)
    with pytest.raises(ModelError, match=r"tensor_parallel: must be 1, is 2: transformers computes"):
        check_can_shard(other, 2, tmp_path)
