"""One worker process' server: tried again after a restart without a leak, never serving after a stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvhive.proto.index_schema import IndexKeys
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer
from kvhive.worker.server_life import ServerLife

KEYS = IndexKeys("life")


def factory(model: Path, redis_url: str, made: list[WorkerServer]) -> Callable[[], WorkerServer]:
    options = WorkerOptions(
        worker_id="w1",
        cluster="life",
        model_path=str(model),
        model_name="tiny",
        redis_url=redis_url,
        cluster_token="t",
        pool_tokens=1024,
        max_context=512,
    )

    def make() -> WorkerServer:
        made.append(WorkerServer(options))
        return made[-1]

    return make


def service_threads() -> int:
    return sum(thread.name == "service" for thread in threading.enumerate())


def eventually(check: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return check()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_the_first_start_is_tried_once_and_says_why_it_failed(tmp_path: Path) -> None:
    made: list[WorkerServer] = []
    life = ServerLife(factory(tmp_path / "no.gguf", "redis://127.0.0.1:1", made), restarted=False)
    before = service_threads()
    life.run()
    assert life.phase == "failed" and "no.gguf" in life.failure
    assert len(made) == 1
    assert service_threads() == before


async def test_a_restarted_worker_tries_until_it_serves_and_leaks_no_thread(
    tmp_path: Path, demo_gguf: Path, redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    made: list[WorkerServer] = []
    model = tmp_path / "model.gguf"
    before = service_threads()
    life = ServerLife(factory(model, redis_server.url, made), restarted=True, retry_first_s=0.05)
    runner = threading.Thread(target=life.run)
    runner.start()
    assert eventually(lambda: len(made) >= 4, 20)
    assert service_threads() <= before + 1
    assert life.phase == "failed"
    model.symlink_to(demo_gguf)
    assert eventually(lambda: life.phase == "serving", 60)
    assert life.failure == ""
    assert await index_redis.hget(KEYS.worker("w1"), "state") == b"serving"
    life.stop(0.0)
    assert life.phase == "stopped"
    runner.join(10)
    assert service_threads() == before
    assert await index_redis.zscore(KEYS.workers, "w1") is None


async def test_a_stop_during_the_start_leaves_no_registration(
    demo_gguf: Path, redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    made: list[WorkerServer] = []
    before = service_threads()
    life = ServerLife(factory(demo_gguf, redis_server.url, made), restarted=False)
    runner = threading.Thread(target=life.run)
    runner.start()
    assert eventually(lambda: made[0].progress() != "starting", 20)
    began = time.monotonic()
    life.stop(5.0)
    assert time.monotonic() - began < 1, "a start under way is not waited for"
    assert life.phase == "stopped"
    runner.join(60)
    assert not runner.is_alive()
    assert life.phase == "stopped"
    assert await index_redis.zscore(KEYS.workers, "w1") is None
    assert service_threads() == before
