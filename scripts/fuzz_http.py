"""Call the HTTP door with what its own OpenAPI document allows and forbids: `scripts/fuzz_http --cases 5000`.

schemathesis makes the requests; it is no dependency of kvhive's: `pip install schemathesis` somewhere, and
name its program by `--schemathesis`. Without a URL, a router of our own before simulated workers is called.
Whatever is sent must be answered in time, as the document says and without a status of 500 or more; what the
document forbids must be refused; and afterwards nothing may be left at the router or in a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import grpc

from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.scripts.bench_proxy_rig import running_rig
from kvhive.scripts.fuzz_grpc import MAX_CONTEXT, left

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
"""Not that all is accepted which the document allows: it cannot say what fits into a context together."""
REQUEST_TIMEOUT_S = 60
"""A request that takes longer hangs."""


@contextlib.contextmanager
def _target(url: str, grpc_target: str) -> Iterator[tuple[str, str]]:
    """Name what is to be called, and start it where nothing is named."""
    if url:
        yield url, grpc_target
        return
    with running_rig(2, 0.0, max_context=MAX_CONTEXT, simulated=True) as rig:
        yield rig.http, rig.grpc


def fuzz(program: str, url: str, cases: int, seed: int) -> dict[str, Any]:
    """Run schemathesis; return its report. Some cases more than asked for: the edges of every field.

    What takes no body has few cases, however many are wanted, so those that take one share them all.
    """
    posts = _posts(url)
    with tempfile.TemporaryDirectory(prefix="kvhive-fuzz-") as folder:
        report = Path(folder) / "report.json"
        command = [program, "run", f"{url}/openapi.json", "--url", url, "--checks", ",".join(CHECKS)]
        command += ["--phases", "coverage,fuzzing", "--max-examples", str(-(-cases // posts))]
        command += ["--seed", str(seed), "--generation-database", "none", "--continue-on-failure"]
        command += [
            "--request-timeout",
            str(REQUEST_TIMEOUT_S),
            "--suppress-health-check",
            "all",
            "--no-color",
        ]
        command += ["--report", "json", "--report-json-path", str(report), "--warnings", "off"]
        subprocess.run(command, stdout=sys.stderr, check=False, cwd=folder)
        made: dict[str, Any] = json.loads(report.read_text())
        return made


def _posts(url: str) -> int:
    """Return how many operations of the document take a body."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=REQUEST_TIMEOUT_S) as answer:
        paths: dict[str, Any] = json.load(answer)["paths"]
    return sum("post" in path for path in paths.values())


async def left_behind(target: str) -> list[str]:
    """Wait until all is idle, and say what is not."""
    async with grpc.aio.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        return await left(inference_pb2_grpc.InferenceStub(channel), ())


@click.command()
@click.option("--url", default="", help="Base URL of a router; empty starts one.")
@click.option("--grpc-target", default="", help="Its host:port for gRPC.")
@click.option("--cases", type=click.IntRange(1), default=5000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--schemathesis", "program", default="st", show_default=True)
def main(url: str, grpc_target: str, cases: int, seed: int, program: str) -> None:
    """Fuzz the HTTP door; print a summary as JSON. The exit status is 1 where something went wrong."""
    with _target(url, grpc_target) as (http, target):
        report = fuzz(program, http, cases, seed)
        busy = asyncio.run(left_behind(target)) if target else []
    click.echo(json.dumps({"report": report, "left": busy}, indent=1))
    sys.exit(1 if busy or report.get("failures") else 0)


if __name__ == "__main__":
    main()
