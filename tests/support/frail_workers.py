"""Workers that die under a request at a token of its own: to the router it looks as if they were gone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvhive.proto.v1 import worker_pb2
from kvhive.router.worker_client import WorkerBusy, WorkerClient, WorkerLost


@dataclass
class FrailWorkers:
    """A WorkerClient around another one."""

    inner: WorkerClient
    fates: dict[int, list[int]] = field(default_factory=dict)
    """Seed of a request -> after how many tokens each of its workers in turn dies."""
    deaths: int = 0
    full: bool = False
    """They do not die, but have no more room."""

    async def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """See WorkerClient."""
        fates = self.fates.get(request.sampling.seed)
        # The choices that were resumed come one by one, and die with the first of them.
        most = fates[0] if fates else None
        tokens = 0
        async with aclosing(self.inner.generate(address, request)) as messages:
            async for message in messages:
                tokens += sum(len(update.token_ids) for update in message.updates)
                if most is not None and tokens > most:
                    assert fates
                    fates.pop(0)
                    self.deaths += 1
                    if self.full:
                        raise WorkerBusy("pinned blocks left no room")
                    raise WorkerLost(f"the worker at {address} died after {most} tokens")
                yield message

    async def stop_choices(self, address: str, request_id: str, choices: Sequence[int]) -> None:
        """See WorkerClient."""
        await self.inner.stop_choices(address, request_id, choices)
