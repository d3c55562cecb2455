"""The controller's process: steps, and answers whoever asks it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from controller_rig import Ray, Rig
from transfer_rig import until

from kvhive.proto.errors import ClusterError
from kvhive.scripts.control import control
from kvhive.scripts.control_socket import ask, socket_path
from kvhive.scripts.fleet_actors import ActorView


async def test_a_new_controller_answers_only_when_it_knows_which_workers_there_are(tmp_path: Path) -> None:
    """Or a drain that comes in its first moment would be told that there is no such worker."""
    rig, stop, looks = Rig(tmp_path), asyncio.Event(), threading.Event()
    await rig.step()

    class SlowRay(Ray):
        def poll(self) -> dict[str, ActorView]:
            looks.wait(10)
            return super().poll()

    rig.ray = SlowRay(rig.ray.views)
    running = asyncio.create_task(control(rig.another(), tmp_path, stop))
    try:
        with pytest.raises(ClusterError, match="does not answer"):
            await asyncio.to_thread(ask, tmp_path, {"do": "fleet"})
        looks.set()
        await until(lambda: socket_path(tmp_path).exists())
        answer = await asyncio.to_thread(ask, tmp_path, {"do": "fleet"})
        assert [worker["id"] for worker in answer["workers"]] == ["w1", "w2"]
    finally:
        looks.set()
        stop.set()
        await running
