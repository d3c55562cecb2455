"""One line asks, one line answers; whatever else happens is an error and never a hang."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from kvhive.proto.errors import ClusterError
from kvhive.scripts.control_socket import ask, serve_control, socket_path


async def handle(question: dict[str, Any]) -> dict[str, Any]:
    if question.get("do") == "fail":
        raise ClusterError("workers: must be 0 to 1024, are 2000")
    return {"heard": question}


async def test_a_question_is_answered_and_a_refusal_is_the_asker_s_error(tmp_path: Path) -> None:
    async with await serve_control(tmp_path, handle):
        answer = await asyncio.to_thread(ask, tmp_path, {"do": "fleet", "x": [1, 2]})
        assert answer == {"heard": {"do": "fleet", "x": [1, 2]}}
        with pytest.raises(ClusterError, match="are 2000"):
            await asyncio.to_thread(ask, tmp_path, {"do": "fail"})


async def test_only_this_user_may_ask_and_an_old_socket_is_no_hindrance(tmp_path: Path) -> None:
    socket_path(tmp_path).touch()
    async with await serve_control(tmp_path, handle):
        assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o600
        assert await asyncio.to_thread(ask, tmp_path, {})


async def test_what_is_no_question_is_refused_and_the_next_one_is_answered(tmp_path: Path) -> None:
    def say(line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(socket_path(tmp_path)))
            connection.sendall(line)
            return connection.makefile("rb").readline()

    async with await serve_control(tmp_path, handle):
        for wrong in (b"[]\n", b"{\n", b"\xff\n"):
            assert b"error" in await asyncio.to_thread(say, wrong)
        assert await asyncio.to_thread(ask, tmp_path, {})


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="the controller does not answer"):
        ask(tmp_path, {"do": "fleet"})


def test_silence_is_an_error_after_a_while(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_path(tmp_path)))
        silent.listen()
        with pytest.raises(ClusterError, match="the controller does not answer"):
            ask(tmp_path, {"do": "fleet"}, timeout_s=0.2)
