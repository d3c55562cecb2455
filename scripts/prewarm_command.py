"""`kvhive prewarm`: a prompt into the caches of some workers, and what it took at each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from kvhive.client import ONCE, Chat, ChatMessage, Client, PrewarmOptions, Prompt
from kvhive.scripts.cluster_access import callers_key
from kvhive.scripts.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be where."""

    text: str
    system: str | None
    """None: the text as it is; else a conversation of this system message and the text."""
    cache_salt: str
    workers: int
    ttl_s: float | None = None
    """How long it is to be kept after its last use; None: as long as there is room."""


def run(state: ClusterState, wanted: Wanted, as_json: bool) -> None:
    """Ask, wait and print. Raises KvhiveError; click.BadParameter for a number that has no encoding."""
    if not 0 <= wanted.workers < 2**32:
        raise click.BadParameter(f"workers: must be between 1 and 64, is {wanted.workers}")
    prompt: Prompt = wanted.text
    if wanted.system is not None:
        turns = [("system", wanted.system), ("user", wanted.text)]
        prompt = Chat(messages=[ChatMessage(role=role, content=content) for role, content in turns])
    options: PrewarmOptions = {"cache_salt": wanted.cache_salt, "workers": wanted.workers}
    if wanted.ttl_s is not None:
        options["ttl_s"] = wanted.ttl_s
    with Client(state.grpc, api_key=callers_key(state), retry=ONCE) as client:
        answer = client.prewarm(prompt, **options)
    rows = [{f.name: getattr(worker, f.name) for f in worker.DESCRIPTOR.fields} for worker in answer.workers]
    if as_json:
        click.echo(json.dumps({"prompt_tokens": answer.prompt_tokens, "workers": rows}))
        return
    for row in rows:
        click.echo(
            f"{row['worker_id']}: prompt {answer.prompt_tokens} tokens, cached {row['cached_tokens']}, "
            f"pulled {row['pulled_tokens']}, computed {row['written_tokens']}{_kept(row, wanted.ttl_s)}"
        )


def _kept(row: dict[str, Any], ttl_s: float | None) -> str:
    if ttl_s is None:
        return ""
    return f", kept for {ttl_s:g} s" if row["kept"] else f", not kept: {row['not_kept']}"
