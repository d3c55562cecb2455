"""A router's end of a session, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from worker_rig import METADATA, WorkerRig

from kvhive.proto.frames import FrameConnection
from kvhive.proto.v1 import worker_pb2


class Talk:
    """Its gRPC call, and what goes over its connection."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._heard: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self.connection = FrameConnection(
            lambda frame: self._heard.put_nowait(worker_pb2.SessionResponse.FromString(frame)),
            lambda _: self._heard.put_nowait(None),
        )

    def say(self, **fields: Any) -> None:
        self.connection.send(worker_pb2.SessionRequest(**fields).SerializeToString())

    async def read(self) -> worker_pb2.SessionResponse | None:
        """Return the next message, None at the end."""
        return await asyncio.wait_for(self._heard.get(), 10)


@asynccontextmanager
async def session(rig: WorkerRig) -> AsyncIterator[Talk]:
    """Open one, and end it."""
    talk = Talk(rig.stub.Session(worker_pb2.OpenSessionRequest(), metadata=METADATA))
    try:
        offer = await talk.call.read()
        await asyncio.get_running_loop().create_connection(lambda: talk.connection, "127.0.0.1", offer.port)
        talk.connection.send(offer.ticket)
        yield talk
    finally:
        talk.connection.close()
        talk.call.cancel()
