"""The peer's side of `kvhive bench routing`: ai-dynamo-runtime, in whatever Python has it installed.

    PYTHON bench_routing_peer.py WORK_FILE

Reads one JSON command a line and answers each with one JSON line. It imports nothing of kvhive, only
WORK_FILE, which is bench_routing_work.py; so both sides do the same work.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from typing import Any


def load_work(path: str) -> Any:
    """Import the file that says what is to be done."""
    spec = importlib.util.spec_from_file_location("bench_routing_work", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def events_of(work_file: Any, work: Any) -> list[tuple[int, bytes]]:
    """Return (worker, event) with 16 blocks each, as the bindings take them; encoded before any timing."""
    found: list[tuple[int, bytes]] = []
    for chain, worker, length in work.holdings():
        numbers = [work_file.key_number(chain, i) for i in range(length)]
        for at in range(0, length, work_file.BLOCKS_PER_EVENT):
            part = numbers[at : at + work_file.BLOCKS_PER_EVENT]
            blocks = [{"block_hash": number, "tokens_hash": number} for number in part]
            stored = {"parent_hash": numbers[at - 1] if at else None, "blocks": blocks}
            event = {"event_id": len(found), "data": {"stored": stored}, "dp_rank": 0}
            found.append((worker, json.dumps(event).encode()))
    return found


class Peer:
    """Answers the commands."""

    def __init__(self, work_file: Any) -> None:
        from dynamo import _core  # type: ignore[import-not-found]

        self._core = _core
        self._work_file = work_file
        self._tree: Any = None
        self._work: Any = None
        self._service: Any = None
        self._sockets: list[Any] = []

    def build(self, **numbers: int) -> dict[str, Any]:
        """Fill a tree, and check that it knows what it was told."""
        self._work = self._work_file.IndexWork(**numbers)
        self._tree, events = self._core.RadixTree(), events_of(self._work_file, self._work)
        for worker, event in events:
            self._tree.apply_event(worker, event)
        wrong = sum(
            {worker: n for (worker, _), n in self._tree.find_matches(prompt).scores.items()} != expected
            for prompt, expected in zip(self._prompts(), self._work.expected(), strict=True)
        )
        return {"wrong": wrong}

    def match(self) -> dict[str, Any]:
        """Time each prompt's match."""
        times = []
        for prompt in self._prompts():
            began = time.perf_counter()
            self._tree.find_matches(prompt)
            times.append((time.perf_counter() - began) * 1e6)
        return {"us": times}

    def events(self, **numbers: int) -> dict[str, Any]:
        """Time the building of a tree."""
        events = events_of(self._work_file, self._work_file.IndexWork(**numbers))
        blocks = sum(event.count(b'"block_hash"') for _, event in events)
        tree = self._core.RadixTree()
        began = time.perf_counter()
        for worker, event in events:
            tree.apply_event(worker, event)
        tree.find_matches([1])  # events are applied by another thread: this one waits for it
        return {"blocks": blocks, "s": time.perf_counter() - began}

    async def select(self, tokens: int, prompts: int, workers: int) -> dict[str, Any]:
        """Time whole decisions among workers that hold nothing."""
        if self._service is None:
            await self._start(workers)
        times = []
        for number in range(prompts):
            ids = self._work_file.prompt_tokens(tokens, number)
            request = {"model_name": "m", "token_ids": ids, "selection_id": f"{time.monotonic_ns()}"}
            began = time.perf_counter()
            await self._service.select(request)
            times.append((time.perf_counter() - began) * 1e6)
        return {"us": times}

    async def _start(self, workers: int) -> None:
        import zmq  # type: ignore[import-not-found]

        context = zmq.Context()
        self._service = self._core.SelectionService(indexer_threads=1)
        for worker in range(workers):
            socket = context.socket(zmq.PUB)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._sockets.append(socket)
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "m",
                    "endpoint": f"http://127.0.0.1:{20_000 + worker}",
                    "block_size": 16,
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "total_kv_blocks": 65_536,
                }
            )
        for _ in range(200):
            if self._service.ready()["schedulable_workers"] == workers:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"not ready: {self._service.ready()}")

    def _prompts(self) -> list[list[int]]:
        name, new = self._work_file.key_number, self._work_file.new_number
        return [
            [name(chain, i) if i < known else new(n, i) for i in range(self._work.prompt_blocks)]
            for n, (chain, known) in enumerate(self._work.prompts())
        ]


async def main(work_path: str) -> None:
    """Answer commands until the input ends."""
    peer = Peer(load_work(work_path))
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        answer = getattr(peer, command.pop("do"))(**command)
        if asyncio.iscoroutine(answer):
            answer = await answer
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
