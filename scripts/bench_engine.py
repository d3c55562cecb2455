"""`kvhive bench engine`: our cluster and any OpenAI-compatible servers, under the same load."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import click
import h11

from kvhive.proto.errors import ClusterError, ConfigError
from kvhive.scripts import bench_figure
from kvhive.scripts.bench_client import ExchangeFailed, get_json
from kvhive.scripts.bench_report import document, ratios, run_line, table
from kvhive.scripts.bench_run import Plan, RunResult, Target, measure
from kvhive.scripts.bench_workloads import WORKLOADS, TokenRange

ASK_TIMEOUT_S = 10.0
"""How long a server may take to say which model it has."""
OURS = "kvhive"
_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(https?://.*)")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the results go besides the terminal."""

    json: Path | None = None
    png: Path | None = None


def run(addresses: Sequence[tuple[str, str]], model: str, plan: Plan, outputs: Outputs) -> int:
    """Measure and print; return the exit status, 1 where any request failed.

    `addresses` are (name, base URL); the others are compared with the first. `model` is empty for the first
    that each server names. Raises ClusterError for a server that does not answer, ConfigError.
    """
    if outputs.png is not None:
        bench_figure.check_drawable()
        if len(addresses) < 2:
            raise ConfigError("--png draws ratios: it needs two targets or more")
    for path in (outputs.json, outputs.png):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
    targets = asyncio.run(_ask_all(addresses, model))
    click.echo(f"seed {plan.seed}; {', '.join(f'{t.name} = {t.url} ({t.model})' for t in targets)}", err=True)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def report(result: RunResult) -> None:
        click.echo(run_line(result, plan.runs), err=True)
        for problem in sorted({timing.error for timing in result.requests} - {""}):
            click.echo(f"  {problem}", err=True)

    results = asyncio.run(measure(targets, plan, time.perf_counter, report))
    click.echo("\n".join(table(results, targets, plan)))
    _write(outputs, document(results, targets, plan, installed_version("kvhive"), when))
    if outputs.png is not None:
        names = [target.name for target in targets]
        bench_figure.draw(outputs.png, ratios(results, names[0]), names[0], names[1:])
    return 1 if any(result.failures for result in results) else 0


def parse_addresses(ours: str | None, urls: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, base URL) of each target, ours first; a URL may be `NAME=URL`. Raises ConfigError.

    No target may be named twice: the second would find the first one's prompts in its cache.
    """
    found = [] if ours is None else [(OURS, _base(ours))]
    for text in urls:
        named = _NAMED.fullmatch(text)
        url = _base(named[2] if named else text)
        found.append((named[1] if named else url.partition("://")[2], url))
    if not found:
        raise ConfigError("nothing to measure: give --url, or leave --only-urls out")
    for what, values in (("name", [name for name, _ in found]), ("URL", [url for _, url in found])):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"--url: the {what} {twice} is there twice")
    return found


def parse_plan(workloads: str, runs: int, seed: str, timeout_s: float, pause_s: float) -> Plan:
    """Return what is to be measured; an empty seed becomes one never used before. Raises ConfigError."""
    names = tuple(dict.fromkeys(workloads.split(",")))
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ConfigError(f"--workload: must be some of {','.join(WORKLOADS)}, has {unknown[0]!r}")
    return Plan(names, runs, seed or secrets.token_hex(4), TokenRange(), timeout_s, pause_s)


def _base(url: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ConfigError(f"--url: must be [NAME=]http://host:port, is {url!r}")
    return url.rstrip("/").removesuffix("/v1")


async def _ask_all(addresses: Sequence[tuple[str, str]], model: str) -> list[Target]:
    return [await _ask(name, url, model) for name, url in addresses]


async def _ask(name: str, url: str, model: str) -> Target:
    """Return a target, by what its server says it is. Raises ClusterError."""
    refusals = (OSError, ValueError, LookupError, TypeError, ExchangeFailed, h11.RemoteProtocolError)
    try:
        models = (await get_json(f"{url}/v1/models", ASK_TIMEOUT_S))["data"]
        names = [str(entry["id"]) for entry in models]
        chosen = model or names[0]
    except refusals as error:
        raise ClusterError(f"{name}: {url}/v1/models gives no list of models ({error!r})") from error
    if chosen not in names:
        raise ClusterError(f"{name}: serves {', '.join(names)}, not {chosen}")
    about: dict[str, Any] = {"model": models[names.index(chosen)]}
    with contextlib.suppress(*refusals):  # only some say it
        about["version"] = await get_json(f"{url}/version", ASK_TIMEOUT_S)
    return Target(name, url, chosen, about)


def _write(outputs: Outputs, content: dict[str, Any]) -> None:
    if outputs.json is not None:
        outputs.json.write_text(json.dumps(content, indent=1) + "\n")
