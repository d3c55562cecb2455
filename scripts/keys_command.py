"""`kvhive keys`: adds to the file of API keys, lists it, and takes out of it. A running router follows it.

A key is shown once, when it is made; the file has its SHA-256 alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from kvhive.proto.config import load_config
from kvhive.proto.errors import ConfigError
from kvhive.proto.limits import MAX_PRIORITY
from kvhive.router.auth.key_file import read_keys, read_text
from kvhive.router.auth.key_list import key_digest, key_line, key_lines, new_key, parse_keys
from kvhive.router.auth.principal import Principal
from kvhive.scripts.cluster_state import choose_cluster, state_root

file_option = click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file of keys; by default access.keys_file of the cluster that is up, or of ./cluster.yaml.",
)
cluster_option = click.option("--cluster", metavar="NAME", help="Whose file, without --file.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
def keys() -> None:
    """API keys: who may ask the cluster (docs/security.md)."""


@keys.command()
@click.argument("name")
@file_option
@cluster_option
@click.option("--namespace", default="", help="Share cached blocks with the other keys of this namespace.")
@click.option(
    "--max-priority",
    type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    default=MAX_PRIORITY,
    show_default=True,
    help="Higher priorities of its requests are lowered to it.",
)
@click.option("--admin", is_flag=True, help="May read /metrics and describe the cluster, too.")
@json_option
def add(
    name: str,
    file: Path | None,
    cluster: str | None,
    namespace: str,
    max_priority: int,
    admin: bool,
    as_json: bool,
) -> None:
    """Make a key for NAME, which is also its tenant, and print it: it cannot be shown again."""
    path, key = _file(file, cluster), new_key()
    line = key_line(key_digest(key), Principal(name, namespace, max_priority, admin))

    def added(text: str) -> str:
        return f"{text.rstrip()}\n{line}\n".lstrip()

    _edit(path, added)
    click.echo(json.dumps({"name": name, "key": key}) if as_json else key)


@keys.command("list")
@file_option
@cluster_option
@json_option
def list_keys(file: Path | None, cluster: str | None, as_json: bool) -> None:
    """Show who has a key. The keys themselves are nowhere."""
    found = read_keys(_file(file, cluster)).by_digest
    rows = [
        {
            "name": holder.name,
            "namespace": holder.namespace,
            "max_priority": holder.max_priority,
            "admin": holder.admin,
            "sha256": digest,
        }
        for digest, holder in found.items()
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        namespace = f"  namespace {row['namespace']}" if row["namespace"] else ""
        priority = f"  max priority {row['max_priority']}" if row["max_priority"] != MAX_PRIORITY else ""
        admin = "  admin" if row["admin"] else ""
        click.echo(f"{row['name']}  sha256 {str(row['sha256'])[:12]}...{namespace}{priority}{admin}")
    if not rows:
        click.echo("no keys: only this command line is let in")


@keys.command()
@click.argument("name")
@file_option
@cluster_option
def revoke(name: str, file: Path | None, cluster: str | None) -> None:
    """Take NAME's key out: refused within a second; streams that run go on."""
    path = _file(file, cluster)

    def revoked(text: str) -> str:
        lines = text.splitlines(keepends=True)
        theirs = [number for number, line in key_lines(text) if json.loads(line)["name"] == name]
        if not theirs:
            raise ConfigError(f"has no key {name!r}")
        return "".join(line for number, line in enumerate(lines, 1) if number not in theirs)

    _edit(path, revoked)
    click.echo(f"revoked {name}")


def _file(file: Path | None, cluster: str | None) -> Path:
    """Return the file that is meant. Raises ConfigError."""
    if file is not None:
        return file
    state = choose_cluster(state_root(os.environ), cluster).load()
    if state is not None:
        configured = state.config.get("access", {}).get("keys_file", "")
    else:
        beside = Path("cluster.yaml")
        configured = load_config(beside.read_text()).access.keys_file if beside.exists() else ""
    if not configured:
        raise ConfigError("access.keys_file: is not set here; name the file with --file")
    return Path(configured).expanduser()


def _edit(path: Path, change: Callable[[str], str]) -> None:
    """Replace the file's text at once, or leave it whole. Raises ConfigError where either would be bad."""
    path = path.resolve()  # a link stays one
    folder = path.parent
    with _locked(folder):
        try:
            before = read_text(path) if path.exists() else ""
            parse_keys(before)
            after = change(before)
            parse_keys(after)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        fresh = path.with_name(f".{path.name}.new")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                _keep_access(path, descriptor)
                file.write(after)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except (OSError, ConfigError) as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _keep_access(path: Path, fresh: int) -> None:
    """Let those read the new file who might the old one: its router may run as another user.

    A first one is its maker's alone. Raises ConfigError.
    """
    if not path.exists():
        os.fchmod(fresh, 0o600)
        return
    before = path.stat()
    try:
        os.fchown(fresh, before.st_uid, before.st_gid)
        os.fchmod(fresh, before.st_mode & 0o777)
    except OSError as error:
        raise ConfigError(
            f"{path}: must stay its owner's (user {before.st_uid}, group {before.st_gid}), and only they may "
            f"edit it: {error.strerror}"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others from editing at the same time, and one key from getting lost. Raises ConfigError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
