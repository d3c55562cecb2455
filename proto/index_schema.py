"""The index in Redis, on one page. Each worker writes only its own keys; readers never scan the keyspace.

    kvhive:<cluster>:workers                 ZSET    worker id -> lease deadline, ms of Redis' own clock
    kvhive:<cluster>:worker:{<id>}           HASH    WorkerRecord, and an incarnation; expires with the lease
    kvhive:<cluster>:blocks:{<id>}:<epoch>   SET     16-byte keys of the blocks this worker holds now
    kvhive:<cluster>:events:{<id>}:<epoch>   STREAM  EventBatch per entry, ids `<epoch>-<seq>`, seq from 1

The braces are literal: they are a Redis Cluster hash tag, so that one script may touch all keys of a
worker while the workers spread over the nodes of a Redis Cluster. No script touches `workers` together
with anything else. Deadlines are on Redis' clock, so workers' and routers' clocks need not agree. An epoch
is Redis' time in ms at registration (or the last epoch + 1 if that is larger): it grows without being
stored, and explicit stream ids make Redis itself refuse a zombie's late write.

Stream entry fields: `stored` (packed keys) and `removed:<cause>` (packed keys), each absent when empty.
The blocks SET and the STREAM change in one transaction. Nothing here has no expiry: with its lease a worker
renews the expiry of its SET, its STREAM and of `workers`, so a dead cluster's keys vanish by themselves.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

STREAM_MAX_BATCHES = 1024
"""Batches kept per stream; a reader further behind takes a snapshot of that worker."""

KEYS_PER_BATCH = 4096
"""Most keys in one batch, so that no script holds Redis for more than a few ms."""

DATA_EXPIRY_LEASES = 4
"""The blocks SET and the STREAM live this many leases past the last renewal."""


class WorkerState(StrEnum):
    """Where a worker is in its life; only SERVING workers get requests."""

    STARTING = "starting"
    WARMING = "warming"
    """Loaded, and taking hot blocks from its peers before it is to serve."""
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """The names of one cluster's keys."""

    cluster: str

    @property
    def _prefix(self) -> str:
        return f"kvhive:{self.cluster}:"

    @property
    def workers(self) -> str:
        """The ZSET of leases."""
        return f"{self._prefix}workers"

    def worker(self, worker_id: str) -> str:
        """The HASH of one worker's record."""
        return f"{self._prefix}worker:{{{worker_id}}}"

    def blocks(self, worker_id: str, epoch: int) -> str:
        """The SET of one worker's block keys."""
        return f"{self._prefix}blocks:{{{worker_id}}}:{epoch}"

    def events(self, worker_id: str, epoch: int) -> str:
        """The STREAM of one worker's event batches."""
        return f"{self._prefix}events:{{{worker_id}}}:{epoch}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of its load, pool and speed; every rate is measured by the worker itself."""

    queued_prefill_tokens: int = 0
    """Prompt tokens admitted or waiting whose KV is not yet computed."""
    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences not yet admitted."""
    waiting_tokens: int = 0
    """Of the queued prefill tokens, those of sequences not yet admitted: cached or not, nobody knows yet."""
    max_running: int = 0
    """Most sequences in the batch; 0: not known."""
    queued_low_tokens: int = 0
    """Of queued_prefill_tokens, those of a priority below 0: what everybody else goes before."""
    queued_high_tokens: int = 0
    """Those of a priority above 0, which goes before everybody else."""
    waiting_low: int = 0
    """Of the sequences not yet admitted, those of a priority below 0."""
    waiting_high: int = 0
    """Those of a priority above 0."""
    blocks_total: int = 0
    blocks_live: int = 0
    """Blocks some request is using."""
    blocks_cached: int = 0
    """Blocks no request is using whose content can still be hit."""
    blocks_free: int = 0
    """Blocks with nothing in them. live + cached + free = total."""
    blocks_pinned: int = 0
    """Of the live and the cached ones, those under a lease."""
    answer_tokens: float = 0.0
    """The mean length of answers, of late."""
    growth_tokens: float = 0.0
    """What the running sequences together are expected to generate yet."""
    release_tokens: float = 0.0
    """What one of them is, weighted by what it holds."""
    victim_reuse: float = 0.0
    """How likely a block that is evicted would have been hit, between 0 and 1."""
    step_base_s: float = 0.0
    """Step-time model: seconds a step costs before any token."""
    step_per_token_s: float = 0.0
    """Step-time model: seconds per computed token."""
    step_per_attention_s: float = 0.0
    """Step-time model: seconds per (computed token x context token) pair."""
    max_step_tokens: int = 1
    """The token budget of one step."""
    prefix_queries: int = 0
    """Prompt tokens of all admitted requests since the worker's process began."""
    prefix_hits: int = 0
    """Of those, the tokens found in the cache."""
    admitted: int = 0
    """Requests whose prompts these were."""
    prefill_pairs: int = 0
    """(Computed token x context token) pairs of what was not found: what their attention costs."""
    preemptions: int = 0
    accounting_errors: int = 0
    """Times the pool had live blocks while nothing ran: a fault of ours, never of a request."""
    drafted_tokens: int = 0
    """Drafts that were verified since the worker's process began."""
    accepted_tokens: int = 0
    """Of those, the ones that were right."""
    block_bytes: int = 0
    """Bytes that one block is to a transfer; 0 where blocks do not move."""
    pull_latency_s: float = 0.0
    """Seconds that a pull takes whatever its size, as far as it was measured."""
    pull_bytes_per_s: float = 0.0
    """How fast blocks come here from other workers; 0 while it was not measured."""
    pulls: int = 0
    """Pulls that brought what there was."""
    pulled_tokens: int = 0
    """Prompt tokens that came from other workers and were not computed."""
    pull_fallbacks: int = 0
    """Pulls whose rest was computed instead, whatever the cause."""
    index_lag_batches: int = 0
    """Event batches not yet accepted by Redis."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's registration: everything a router must know before it sends a request."""

    worker_id: str
    address: str
    """host:port of its kvhive.v1.Worker service."""
    epoch: int
    model: str
    """Name clients use."""
    model_identity: str
    """Hex digest of weights, config and KV layout; the root of every block hash."""
    block_size: int
    max_context: int
    """Most tokens of prompt and output together that one request may have here."""
    vocab_size: int
    state: WorkerState
    device: str
    pid: int
    load: LoadReport = LoadReport()

    def to_fields(self) -> dict[str, str]:
        """Return the HASH's fields."""
        flat = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name != "load"}
        return {**flat, "load": json.dumps(asdict(self.load), separators=(",", ":"))}

    @classmethod
    def from_fields(cls, raw: dict[bytes, bytes]) -> WorkerRecord:
        """Parse a HASH, ignoring unknown fields. Raises ValueError when one is missing or malformed."""
        try:
            text = {name.decode(): value.decode() for name, value in raw.items()}
            numbers = json.loads(text["load"])
            if not isinstance(numbers, dict):
                raise ValueError("load is not an object")
            known = {f.name for f in fields(LoadReport)}
            load = LoadReport(**{k: v for k, v in numbers.items() if k in known and _is_number(v)})
            if load.max_step_tokens < 1:
                raise ValueError(f"load.max_step_tokens is {load.max_step_tokens}")
            return cls(
                worker_id=text["worker_id"],
                address=text["address"],
                epoch=int(text["epoch"]),
                model=text["model"],
                model_identity=text["model_identity"],
                block_size=int(text["block_size"]),
                max_context=int(text["max_context"]),
                vocab_size=int(text["vocab_size"]),
                state=WorkerState(text["state"]),
                device=text["device"],
                pid=int(text["pid"]),
                load=load,
            )
        except (KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"worker record: {error!r}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def stream_id(epoch: int, seq: int) -> str:
    """The id of a worker's `seq`-th batch in an epoch."""
    return f"{epoch}-{seq}"


def parse_stream_id(raw: bytes | str) -> tuple[int, int]:
    """Split `<epoch>-<seq>`. Raises ValueError."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    epoch, _, seq = text.partition("-")
    return int(epoch), int(seq)
