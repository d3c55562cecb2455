"""What a worker says to Redis: each script with its keys and arguments, built from plain values. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhive.proto.index_schema import (
    DATA_EXPIRY_LEASES,
    STREAM_MAX_BATCHES,
    IndexKeys,
    WorkerRecord,
    stream_id,
)
from kvhive.proto.kv_events import EventBatch, pack_keys
from kvhive.worker import index_scripts
from kvhive.worker.index_scripts import IndexScript

Argument = str | int | bytes


@dataclass(frozen=True, slots=True)
class IndexCall:
    """One conversation with Redis."""

    script: IndexScript
    keys: tuple[str, ...]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What Redis has said yes to in one epoch: the number of the last batch, and the blocks after it."""

    epoch: int
    seq: int = 0
    blocks: int = 0

    @property
    def top_id(self) -> str:
        """Id of the newest stream entry there can be; empty when there is none."""
        return stream_id(self.epoch, self.seq) if self.seq else ""

    def after(self, batch: EventBatch) -> Acknowledged:
        """What is acknowledged once Redis has this batch, too."""
        change = 2 * len(batch.stored) - len(batch)
        return Acknowledged(self.epoch, self.seq + 1, self.blocks + change)


@dataclass(frozen=True, slots=True)
class IndexCalls:
    """Builds the calls of one worker."""

    keys: IndexKeys
    worker_id: str
    lease_ms: int
    incarnation: str
    """Ours alone: by it we know a registration of our own whose answer was lost."""

    def register(self, record: WorkerRecord) -> IndexCall:
        """Ask for an epoch above the record's and any that stands in Redis."""
        fields = record.to_fields()
        del fields["epoch"]
        arguments: tuple[Argument, ...] = (self.lease_ms, record.epoch, self.incarnation, *_flat(fields))
        return IndexCall(index_scripts.REGISTER, (self._record,), arguments)

    def heartbeat(self, record: WorkerRecord, known: Acknowledged, in_doubt: bool) -> IndexCall:
        """Renew the lease and report; with a batch `in_doubt` what Redis has cannot be checked."""
        arguments: tuple[Argument, ...] = (
            self.lease_ms,
            self._data_expiry_ms,
            known.epoch,
            -1 if in_doubt else known.blocks,
            known.top_id,
            *_flat(record.to_fields()),
        )
        return IndexCall(index_scripts.HEARTBEAT, self._all(known.epoch), arguments)

    def lease(self) -> IndexCall:
        """Renew the place among the workers; the answer names some whose lease is over."""
        arguments: tuple[Argument, ...] = (self.worker_id, self.lease_ms, self._data_expiry_ms)
        return IndexCall(index_scripts.LEASE, (self.keys.workers,), arguments)

    def forget(self, worker_ids: Sequence[bytes]) -> IndexCall:
        """Take workers out whose records are gone, unless they are back by now."""
        return IndexCall(index_scripts.FORGET, (self.keys.workers,), tuple(worker_ids))

    def publish(self, known: Acknowledged, batch: EventBatch) -> IndexCall:
        """Append the batch that follows what is known."""
        arguments: tuple[Argument, ...] = (
            known.epoch,
            stream_id(known.epoch, known.seq + 1),
            STREAM_MAX_BATCHES,
            self._data_expiry_ms,
            known.blocks,
            known.top_id,
            *pack_batch(batch),
        )
        return IndexCall(index_scripts.PUBLISH, self._all(known.epoch), arguments)

    def deregister(self, epoch: int) -> IndexCall:
        """Say goodbye and take the blocks along."""
        return IndexCall(index_scripts.DEREGISTER, self._all(epoch), (epoch, self.lease_ms))

    def blocks(self, epoch: int) -> str:
        """Name of the SET of one epoch."""
        return self.keys.blocks(self.worker_id, epoch)

    def events(self, epoch: int) -> str:
        """Name of the STREAM of one epoch."""
        return self.keys.events(self.worker_id, epoch)

    @property
    def _record(self) -> str:
        return self.keys.worker(self.worker_id)

    def _all(self, epoch: int) -> tuple[str, ...]:
        return (self._record, self.blocks(epoch), self.events(epoch))

    @property
    def _data_expiry_ms(self) -> int:
        return self.lease_ms * DATA_EXPIRY_LEASES


def pack_batch(batch: EventBatch) -> list[str | bytes]:
    """Return field, packed keys, ... of the stream entry."""
    parts: list[str | bytes] = ["stored", pack_keys(batch.stored)] if batch.stored else []
    for cause, keys in batch.removed.items():
        parts += [f"removed:{cause}", pack_keys(keys)]
    return parts


def _flat(fields: dict[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]
