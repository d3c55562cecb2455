"""Workers as plain child processes, without Ray: for measurements and soaks that stop and kill them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import grpc

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.errors import ClusterError
from kvhive.proto.transport import CLUSTER_TOKEN_KEY, MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.scripts import private_network
from kvhive.worker.options import WorkerOptions

START_TIMEOUT_S = 120.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def _serve(options: WorkerOptions, told: Connection, place: str) -> None:
    """Be a worker until the other end of the pipe is closed, or the parent has gone."""
    if place:
        private_network.enter(place)
    from kvhive.worker.server import WorkerServer

    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    failed = threading.Event()
    server = WorkerServer(options, on_failure=failed.set)
    try:
        server.start()
        told.send((server.address, server.epoch))
        with contextlib.suppress(EOFError):
            while not failed.is_set():
                if told.poll(0.2):
                    told.recv()
    finally:
        server.stop(0.0)


class BareWorker:
    """One worker id, whose process may come and go. `start` blocks; the calls are asynchronous."""

    def __init__(self, options: WorkerOptions, place: str = "") -> None:
        """Prepare; `place` names the network namespace that it is to live in."""
        self._options = options
        self._place = place
        self._metadata = ((CLUSTER_TOKEN_KEY, options.cluster_token),)
        self._process: ForkServerProcess | None = None
        self._told: Connection | None = None
        self._channel: grpc.aio.Channel | None = None
        self._channel_address = ""
        self.worker_id = options.worker_id
        self.address = ""
        self.epoch = 0

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None and self._process.pid is not None, "it has no process"
        return self._process.pid

    def start(self) -> None:
        """Start its process and wait until it serves. Raises ClusterError."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvhive.worker.server"])  # torch is imported once for all
        self._told, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._options, theirs, self._place), daemon=True)
        self._process.start()
        theirs.close()
        if not self._told.poll(START_TIMEOUT_S):
            raise ClusterError(f"worker {self.worker_id} has not started within {START_TIMEOUT_S:g} s")
        try:
            self.address, self.epoch = self._told.recv()
        except EOFError as error:
            raise ClusterError(f"worker {self.worker_id} could not start") from error

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to its process."""
        os.kill(self.pid, what)

    @property
    def alive(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self._process is not None and self._process.is_alive()

    def retire(self, within_s: float) -> None:
        """Let its process say goodbye and end; kill it after `within_s`."""
        assert self._process is not None and self._told is not None, "it has no process"
        self._told.close()
        self._process.join(within_s)
        self.end()

    def end(self) -> None:
        """Kill its process, whatever state it is in."""
        if self._process is not None and self._process.pid is not None:  # it was started
            self._process.kill()
            self._process.join(10)
        if self._told is not None:
            self._told.close()

    async def stub(self) -> Any:
        """Return the stub of the process that it has now."""
        if self._channel is None or self._channel_address != self.address:
            await self.disconnect()
            self._channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
            self._channel_address = self.address
        return worker_pb2_grpc.WorkerStub(self._channel)

    async def disconnect(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def as_source(self, blocks: int) -> worker_pb2.BlockSource:
        """Name it as a source."""
        return worker_pb2.BlockSource(
            worker_id=self.worker_id, address=self.address, epoch=self.epoch, blocks=blocks
        )

    async def generate(
        self,
        request_id: str,
        tokens: Iterable[int],
        max_tokens: int,
        source: worker_pb2.BlockSource | None = None,
        cache_salt: str = "",
    ) -> tuple[list[int], worker_pb2.WorkerGenerateResponse]:
        """Return the greedy answer, and the message with what the cache gave it. Raises AioRpcError."""
        request = worker_pb2.WorkerGenerateRequest(
            worker_id=self.worker_id,
            request_id=request_id,
            token_ids=pack_tokens(tokens),
            cache_salt=cache_salt,
            n=1,
            source=source,
            sampling=worker_pb2.WorkerSampling(
                max_tokens=max_tokens, top_p=1, typical_p=1, repetition_penalty=1, speculate=False
            ),
        )
        answer, first = list[int](), worker_pb2.WorkerGenerateResponse()
        stub = await self.stub()
        async for message in stub.Generate(request, metadata=self._metadata):
            if message.HasField("cached_tokens"):
                first = message
            answer += [token for update in message.updates for token in update.token_ids]
        return answer, first

    async def status(self, audit: bool = False) -> worker_pb2.GetStatusResponse:
        """Return its accounting, with an audit where asked. Raises AioRpcError."""
        stub = await self.stub()
        answer: worker_pb2.GetStatusResponse = await stub.GetStatus(
            worker_pb2.GetStatusRequest(audit=audit), metadata=self._metadata, timeout=10
        )
        return answer

    async def clear(self) -> int:
        """Forget what it has cached; return how many blocks that were. Raises AioRpcError."""
        stub = await self.stub()
        answer = await stub.ClearCache(worker_pb2.ClearCacheRequest(), metadata=self._metadata, timeout=30)
        return int(answer.cleared_blocks)


@contextlib.contextmanager
def bare_workers(all_options: Iterable[WorkerOptions]) -> Iterator[list[BareWorker]]:
    """Start workers; end them in any case."""
    workers = [BareWorker(options) for options in all_options]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            worker.end()
