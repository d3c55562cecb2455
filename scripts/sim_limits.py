"""What no router can beat: caches that never evict, that know the future, or that are one for all.

    infinite   every block is computed once: the ceiling of any hit rate
    belady     one cache as large as all pools together, which evicts what is needed last (Belady, 1966)
    pooled     the same cache, least recently used first, and one queue before all workers: no routing at all

Both caches are prefix-closed without trying: whoever needs a block needs its parent then, too.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.trace_arrivals import Schedule
from kvhive.scripts.trace_format import Trace, TraceRequest

NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Pooled:
    """What one queue and one cache give."""

    hit_rate: float
    ttft_s: Sequence[float]
    order: Sequence[int]
    """The requests in the order of their arrival."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one trace at one pace on one fleet; the same for all policies."""

    infinite_hit_rate: float
    belady_hit_rate: float
    pooled: Pooled


def find_limits(
    trace: Trace, schedule: Schedule, cost: CostModel, workers: int, total_blocks: int, block_size: int
) -> Limits:
    """Compute all three. `total_blocks`: of all pools together, of `block_size` tokens each."""
    pooled = play_pooled(trace, schedule, cost, workers, total_blocks * block_size, block_size)
    requests = [trace.requests[number] for number in pooled.order]
    capacity = total_blocks * block_size // trace.block_size
    return Limits(
        infinite_hit_rate(requests, trace.block_size, block_size),
        belady_hit_rate(requests, trace.block_size, block_size, capacity),
        pooled,
    )


def _chain(request: TraceRequest) -> list[int]:
    return [block for start, count in request.spans() for block in range(start, start + count)]


def _hit_tokens(request: TraceRequest, blocks: int, trace_block: int, block_size: int) -> int:
    """Tokens that cached leading blocks of the trace save: whole blocks of ours, never the last token."""
    most = (request.prompt_tokens - 1) // block_size * block_size
    return min(blocks * trace_block, most)


def infinite_hit_rate(requests: Sequence[TraceRequest], trace_block: int, block_size: int) -> float:
    """The share of prompt tokens that were in an earlier prompt, too."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        chain = _chain(request)
        matched = sum(1 for _ in itertools.takewhile(seen.__contains__, chain))
        hits += _hit_tokens(request, matched, trace_block, block_size)
        seen.update(chain[matched:])
    return hits / sum(request.prompt_tokens for request in requests)


def belady_hit_rate(
    requests: Sequence[TraceRequest], trace_block: int, block_size: int, capacity: int
) -> float:
    """The share of prompt tokens found in a cache of `capacity` trace blocks that knows what comes."""
    uses = _next_uses(requests)
    needed_at: dict[int, int] = {}  # cached block -> the request that needs it next
    last: list[
        tuple[int, int, int]
    ] = []  # (-next use, -depth, block): what goes first, stale entries among them
    hits = 0
    for number, request in enumerate(requests):
        chain = _chain(request)
        matched = sum(1 for _ in itertools.takewhile(needed_at.__contains__, chain))
        hits += _hit_tokens(request, matched, trace_block, block_size)
        for depth, (block, then) in enumerate(zip(chain, uses[number], strict=True)):
            if then == NEVER:
                needed_at.pop(block, None)
            else:
                needed_at[block] = then
                heapq.heappush(last, (-then, -depth, block))
        while len(needed_at) > capacity:
            then, _, block = heapq.heappop(last)
            if needed_at.get(block) == -then:
                del needed_at[block]
    return hits / sum(request.prompt_tokens for request in requests)


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """For each block of each request, the next request that has it."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        chain = _chain(requests[number])
        uses.append([coming.get(block, NEVER) for block in chain])
        coming.update(dict.fromkeys(chain, number))
    uses.reverse()
    return uses


class _SharedCache:
    """One prefix-closed LRU cache of trace blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, chain: Sequence[int]) -> int:
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, chain))

    def use(self, chain: Sequence[int]) -> None:
        for block in reversed(chain):  # leaves are older than what they hang on
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def play_pooled(
    trace: Trace, schedule: Schedule, cost: CostModel, workers: int, total_tokens: int, block_size: int
) -> Pooled:
    """Let `workers` servers take prompts from one queue, with one cache.

    A server computes one prompt at a time and nothing else; answers take no capacity. So its TTFT is below
    what any fleet can reach.
    """
    cache = _SharedCache(total_tokens // trace.block_size)
    events = [
        (at, 0, number) for at, number in schedule.starts
    ]  # (time, 0 arrival or 1 prompt done, request)
    heapq.heapify(events)
    queue: deque[tuple[float, int]] = deque()
    free, hits, order, ttft = workers, 0, [], []
    began: dict[int, float] = {}
    while events:
        now, done, number = heapq.heappop(events)
        request = trace.requests[number]
        if done:
            free += 1
            ttft.append(now - began.pop(number))
            cache.use(_chain(request))
            following = schedule.after.get(number)
            if following is not None:
                answered = now + request.output_tokens * cost.step_s(1, request.prompt_tokens)
                heapq.heappush(events, (answered + trace.requests[following].think_s, 0, following))
        else:
            order.append(number)
            began[number] = now
            queue.append((now, number))
        while free and queue:
            _, number = queue.popleft()
            request = trace.requests[number]
            matched = cache.match(_chain(request))
            cached = _hit_tokens(request, matched, trace.block_size, block_size)
            hits += cached
            free -= 1
            seconds = cost.prefill_s(request.prompt_tokens - cached, cached)
            heapq.heappush(events, (now + seconds, 1, number))
    prompts = sum(trace.requests[number].prompt_tokens for number in order)
    return Pooled(hits / prompts, ttft, order)
