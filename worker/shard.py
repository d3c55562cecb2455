"""Which part of a decoder each rank of a worker owns. No torch here: `kvhive up` asks before anything starts.

    attention     whole KV heads with the queries that read them; where ranks outnumber KV heads, several
                  have a copy of one head's keys and values, and each some of its queries
    feed-forward  a range of the inner dimension
    vocabulary    a range of the embedding's and of the output layer's rows, padded to one length

Nothing has to divide: where it does not, the last ranks have the larger parts, for rank 0 also schedules
and samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.transformers_config import TransformersConfig

_STEP = 16
"""The inner dimension is cut at multiples of it where it can be: vectors and tensor cores read so many."""
_VOCABULARY_STEP = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one dimension."""

    first: int
    count: int
    """May reach beyond `total`: what does is padding."""
    total: int

    def times(self, size: int) -> Part:
        """Return the range where each element is `size` of them."""
        return Part(self.first * size, self.count * size, self.total * size)

    @property
    def own(self) -> slice:
        """The range without padding."""
        return slice(min(self.first, self.total), min(self.first + self.count, self.total))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of any decoder; of one rank alone, all of it."""

    rank: int = 0
    ranks: int = 1

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """Return the decoder that this rank computes between two sums over all ranks."""
        return replace(config, heads=self.queries(config).count, kv_heads=self.keys(config).count)

    def keys(self, config: DecoderConfig) -> Part:
        """Return its KV heads."""
        if config.kv_heads >= self.ranks:
            return _share(config.kv_heads, self.ranks, self.rank)
        head, _ = self._place_at_head(config)
        return Part(head, 1, config.kv_heads)

    def queries(self, config: DecoderConfig) -> Part:
        """Return its query heads: those that read its KV heads, or its part of the queries of one."""
        group = config.heads // config.kv_heads
        if config.kv_heads >= self.ranks:
            return self.keys(config).times(group)
        head, at_head = self._place_at_head(config)
        queries = _share(group, at_head.total, at_head.first)
        return Part(head * group + queries.first, queries.count, config.heads)

    def inner(self, config: DecoderConfig) -> Part:
        """Return its part of the feed-forward layer's inner dimension."""
        size = config.intermediate_size
        step = _STEP if size % _STEP == 0 and size // _STEP >= self.ranks else 1
        return _share(size // step, self.ranks, self.rank).times(step)

    def vocabulary(self, config: DecoderConfig) -> Part:
        """Return its tokens. All ranks have equally many rows; what lies beyond the vocabulary is zeros."""
        if self.ranks == 1:
            return Part(0, config.vocab_size, config.vocab_size)
        rows = -(-config.vocab_size // (self.ranks * _VOCABULARY_STEP)) * _VOCABULARY_STEP
        return Part(self.rank * rows, rows, config.vocab_size)

    def _place_at_head(self, config: DecoderConfig) -> tuple[int, Part]:
        """Where ranks outnumber KV heads: this rank's head, and its place among the ranks that share it."""
        for head in range(config.kv_heads):
            sharers = _share(self.ranks, config.kv_heads, head)
            if self.rank < sharers.first + sharers.count:
                return head, Part(self.rank - sharers.first, 1, sharers.count)
        raise ValueError(f"rank: must be 0 to {self.ranks - 1}, is {self.rank}")


def check_can_shard(config: DecoderConfig | TransformersConfig, ranks: int, source: Path) -> None:
    """Raise ModelError when so many ranks cannot share the model."""
    if ranks == 1:
        return
    field = f"{source}: workers.tensor_parallel"
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"{field}: must be 1, is {ranks}: transformers computes this model, and ranks cannot share that"
        )
    for name, limit in (("heads", config.heads), ("intermediate_size", config.intermediate_size)):
        if ranks > limit:
            raise ModelError(f"{field}: must be at most the model's {name}, {limit}, is {ranks}")


def _share(total: int, parts: int, index: int) -> Part:
    """Return one of `parts` nearly equal ranges of `total`, the smaller ones first."""
    first, end = total * index // parts, total * (index + 1) // parts
    return Part(first, end - first, total)
