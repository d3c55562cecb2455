"""`kvhive generate` and `kvhive chat`: one request, its text as it comes, and what the cache did for it."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import click

from kvhive.scripts.cluster_access import callers_key
from kvhive.scripts.cluster_state import ClusterState

if TYPE_CHECKING:
    from kvhive.proto.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The options that both commands share; None leaves the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    cache_key: str = ""


@dataclass(slots=True)
class Answer:
    """One finished request."""

    request_id: str = ""
    worker_id: str = ""
    text: str = ""
    finish_reason: str = ""
    ttft_s: float = 0.0
    """From sending the request to its first text."""
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the usage line."""
        usage = self.usage
        worker = usage.get("worker_id") or self.worker_id
        moved = f", moved {usage['failovers']}x" if usage.get("failovers") else ""
        pulled = f", pulled {usage['pulled_tokens']}" if usage.get("pulled_tokens") else ""
        return (
            f"[worker {worker} ({usage.get('route_reason') or '?'}{moved}), "
            f"prompt {usage.get('prompt_tokens', 0)} tokens, cached {usage.get('cached_tokens', 0)}{pulled}, "
            f"generated {usage.get('completion_tokens', 0)}, TTFT {self.ttft_s * 1000:.0f} ms, "
            f"{self.total_s:.1f} s, {self.finish_reason}]"
        )


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a click command the shared options, as one argument `flags`."""

    @click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens to generate.")
    @click.option("--temperature", type=float, help="0 is greedy.")
    @click.option("--seed", type=int, help="Same seed, same text.")
    @click.option("--stop", multiple=True, help="Text that ends the output; may be repeated.")
    @click.option("--cache-salt", default="", help="Share cached blocks only with requests of this salt.")
    @click.option("--cache-key", default="", help="A hint about which worker is home.")
    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        names = ("max_tokens", "temperature", "seed", "stop", "cache_salt", "cache_key")
        flags = SamplingFlags(**{name: options.pop(name) for name in names})
        command(*args, flags=flags, **options)

    return wrapped


def text_request(text: str, flags: SamplingFlags) -> pb.GenerateRequest:
    """Build the request that continues plain text. Raises click.BadParameter for a value out of range."""
    request = _request(flags)
    request.text = text
    return request


def chat_request(turns: Sequence[tuple[str, str]], flags: SamplingFlags) -> pb.GenerateRequest:
    """Build the request that answers a conversation of (role, content) turns."""
    request = _request(flags)
    for role, content in turns:
        request.chat.messages.add(role=role, content=content)
    return request


def ask(state: ClusterState, request: pb.GenerateRequest, show: Callable[[str], None]) -> Answer:
    """Send a request, show its text as it comes, and return the whole answer. Raises KvhiveError."""
    from google.protobuf.json_format import MessageToDict

    from kvhive.client import ONCE, Client
    from kvhive.client import Answer as Brought
    from kvhive.proto.v1 import inference_pb2 as pb

    brought, ttft_s, began = Brought(), 0.0, time.monotonic()
    with Client(state.grpc, api_key=callers_key(state), retry=ONCE) as client:
        for event in client.send(request):
            brought.take(event)
            if isinstance(event, pb.Delta):
                ttft_s = ttft_s or time.monotonic() - began
                show(event.text)
    return Answer(
        request_id=brought.request_id,
        worker_id=brought.worker_id,
        text=brought.text,
        finish_reason=brought.choices[0].reason,
        ttft_s=ttft_s,
        total_s=time.monotonic() - began,
        usage=MessageToDict(
            brought.usage, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
    )


def run(state: ClusterState, request: pb.GenerateRequest, as_json: bool) -> None:
    """Ask once and print: the text on stdout with the usage line on stderr, or one JSON object."""
    if as_json:
        answer = ask(state, request, lambda text: None)
        click.echo(json.dumps({name: getattr(answer, name) for name in Answer.__slots__}))
        return
    answer = ask(state, request, _write)
    _finish(answer, sys.stderr)


def converse(state: ClusterState, system: str, flags: SamplingFlags) -> None:
    """Hold a conversation on the terminal until end of input; each turn resends all before it."""
    turns = [("system", system)] if system else []
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            message = input(prompt).strip()
        except EOFError:
            return
        if not message:
            continue
        turns.append(("user", message))
        answer = ask(state, chat_request(turns, flags), _write)
        _finish(answer, sys.stderr)
        turns.append(("assistant", answer.text))


def _request(flags: SamplingFlags) -> pb.GenerateRequest:
    from kvhive.proto.v1 import inference_pb2 as pb

    given = {name: getattr(flags, name) for name in ("max_tokens", "temperature", "seed")}
    try:
        sampling = pb.SamplingParams(
            stop=flags.stop, **{name: value for name, value in given.items() if value is not None}
        )
    except ValueError as error:  # a seed below zero or above 64 bits has no encoding
        raise click.BadParameter(str(error)) from error
    return pb.GenerateRequest(sampling=sampling, cache_salt=flags.cache_salt, cache_key=flags.cache_key)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _finish(answer: Answer, stream: TextIO) -> None:
    _write("\n")
    click.echo(answer.summary(), file=stream)
