"""What `kvhive up` does around a start: reads the file, meets a running cluster, says where things are."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click
import yaml

from kvhive.proto.config import ClusterConfig, load_config, parse_config, to_mapping
from kvhive.proto.errors import ClusterError, ConfigError
from kvhive.router.auth.key_file import read_keys
from kvhive.router.chat.tools.by_name import tool_form
from kvhive.router.policies import make_policy
from kvhive.scripts.adoption import adopt, can_adopt
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.control_socket import ask
from kvhive.scripts.launcher import bring_up
from kvhive.scripts.progress import Progress, show_progress
from kvhive.scripts.teardown import interrupts_ignored, tear_down

DEFAULT_FILE = Path("cluster.yaml")
_WATCH_S = 0.5
_FOREGROUND_GRACE_S = 10.0


def read_config(file: Path | None, name: str | None, overrides: Sequence[str]) -> ClusterConfig:
    """Read the cluster file and apply `KEY=VALUE` overrides (values are YAML). Raises ConfigError."""
    if file is None and not DEFAULT_FILE.exists():
        config = ClusterConfig()
    else:
        path = file or DEFAULT_FILE
        try:
            config = load_config(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    section = to_mapping(config)
    for override in overrides:
        _apply(section, override)
    if name is not None:
        section["cluster"] = name
    keys_file = section["access"]["keys_file"]
    if isinstance(keys_file, str) and keys_file:  # it must mean the same from wherever it is read
        section["access"]["keys_file"] = str(Path(keys_file).expanduser().absolute())
    config = parse_config(section)
    if config.access.keys_file:
        read_keys(Path(config.access.keys_file))  # a bad line is said before anything starts
    return config


def run(config: ClusterConfig, folder: StateFolder, address: str, foreground: bool) -> None:
    """Start the cluster unless it is up already. Raises KvhiveError; an interrupt leaves nothing.

    One that is up with another configuration is an error: nothing of the new one would take effect.
    """
    make_policy(config.router.policy)  # an unknown name is said before anything starts
    tool_form(config.router.tool_format, None, lambda token: False)  # likewise
    _raise_on_signals()
    with folder.lock():
        state = folder.load()
        with show_progress(sys.stderr) as report:
            if state is not None and can_adopt(state):
                _check_same(state, config, address)
                said = _adopted(folder.cluster, adopt(folder, state, report))
            else:
                state = _start(config, folder, state, report, address)
                said = f"cluster {state.cluster!r} is up"
    click.echo(said)
    _say_where(state)
    if foreground:
        _stay(folder, state)


def _start(
    config: ClusterConfig, folder: StateFolder, left: ClusterState | None, report: Progress, address: str
) -> ClusterState:
    """Start it anew, without what an earlier start `left`."""
    if left is not None:
        report("cleaning", "removing what an earlier start left")
        with interrupts_ignored():
            tear_down(folder, left, grace_s=0.0)
    try:
        return bring_up(config, folder, report, address)
    finally:
        if folder.load() is None:
            folder.remove()


def _apply(section: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: must be KEY=VALUE")
    *parents, last = key.split(".")
    place: Any = section
    for parent in parents:
        place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise ConfigError(f"--set {override}: unknown key {key!r}")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: not valid YAML") from error
    if place[last] is None:
        place[last] = ""


class Difference(NamedTuple):
    """A key, dotted, that has another value."""

    key: str
    before: Any
    value: Any


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """Return the first difference in the configuration's order; None: all alike."""
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := first_difference(before, value):
                return inner._replace(key=f"{key}.{inner.key}")
        elif value != before:
            return Difference(key, before, value)
    return None


def _check_same(state: ClusterState, config: ClusterConfig, address: str) -> None:
    found = first_difference(state.config, to_mapping(config))
    if found is None and address and state.ray is not None and state.ray.address != address:
        found = Difference("--address", state.ray.address, address)
    if found is not None:
        raise ClusterError(
            f"cluster {state.cluster!r} is already up with another {found.key} ({found.before!r}, "
            f"not {found.value!r}); stop it with `kvhive down` first"
        )


def _adopted(cluster: str, lost: list[str]) -> str:
    if lost:
        return f"cluster {cluster!r} is up again; these had ended and were started again: {', '.join(lost)}"
    return f"cluster {cluster!r} is already up (stop it with `kvhive down`)"


def _say_where(state: ClusterState) -> None:
    named = "" if state.cluster == "default" else f" --cluster {state.cluster}"
    click.echo(f"  gRPC    {state.grpc}   (kvhive.v1.Inference)")
    click.echo(f"  HTTP    {state.http}   (OpenAI-compatible: {state.http}/v1)")
    click.echo(f"  workers {', '.join(_workers(state)) or 'none'}")
    click.echo(f"next: `kvhive chat{named} 'Hello!'`, `kvhive status{named}`, `kvhive down{named}`")


def _workers(state: ClusterState) -> list[str]:
    """Return the ids of the workers that there are now."""
    fleet = ask(Path(state.runtime_dir), {"do": "fleet"})
    return [worker["id"] for worker in fleet["workers"]]


def _stay(folder: StateFolder, state: ClusterState) -> None:
    click.echo("Ctrl-C stops it")
    try:
        while (now := folder.load()) is not None and now.runtime_dir == state.runtime_dir:
            time.sleep(_WATCH_S)
        click.echo("the cluster was stopped by another command")
    except KeyboardInterrupt:
        with interrupts_ignored(), folder.lock():
            for line in tear_down(folder, state, _FOREGROUND_GRACE_S):
                click.echo(line)


def _raise_on_signals() -> None:
    """Let a hang-up or SIGTERM end a start as Ctrl-C does: with everything removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, interrupt)
