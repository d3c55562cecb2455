"""The command line: `kvhive up | down | status | drain | scale | generate | chat | prewarm | keys | ...`.

Each command finds its cluster by the state that `up` wrote. Errors are one line on stderr and exit status
1; wrong usage is 2. What only one command needs (ray, torch, grpc) is imported in that command.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import click

from kvhive.proto.errors import ClusterError, KvhiveError
from kvhive.scripts.cluster_state import StateFolder, choose_cluster, state_root
from kvhive.scripts.completion import SamplingFlags, sampling_flags
from kvhive.scripts.keys_command import keys
from kvhive.scripts.sim_options import SimulateOptions, simulate_flags

_INTERRUPTED = 130

cluster_option = click.option(
    "--cluster", "name", metavar="NAME", help="Which cluster; by default `default`, or the only one there is."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def main() -> None:
    """Run the command line and exit."""
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except KvhiveError as error:
        print(f"kvhive: {' '.join(str(error).split())}", file=sys.stderr)
        status = 1
    except click.Abort:
        print("kvhive: interrupted", file=sys.stderr)
        sys.stdout.flush()
        # Everything is undone by now. Ray's native threads, cut off half-way, can abort an orderly end.
        os._exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Serve a language model on many workers, and send each prompt where its prefix is cached."""


@cli.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--cluster", "name", metavar="NAME", help="Name of the cluster, instead of the file's.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key, as in workers.count=4."
)
@click.option(
    "--address",
    envvar="RAY_ADDRESS",
    default="",
    help="host:port of a running Ray cluster [env: RAY_ADDRESS]. By default a local one is started.",
)
@click.option("--foreground", is_flag=True, help="Stay, and stop the cluster on Ctrl-C.")
@click.option("--allow-open", is_flag=True, help="Listen beyond loopback without keys (router.allow_open).")
def up(
    file: Path | None,
    name: str | None,
    overrides: tuple[str, ...],
    address: str,
    foreground: bool,
    allow_open: bool,
) -> None:
    """Start a cluster as FILE says (default: ./cluster.yaml, or else all defaults)."""
    from kvhive.scripts import up_command

    overrides += ("router.allow_open=true",) * allow_open
    config = up_command.read_config(file, name, overrides)
    folder = StateFolder(state_root(os.environ), config.cluster)
    up_command.run(config, folder, address, foreground)


@cli.command()
@cluster_option
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 86_400),
    default=10.0,
    show_default=True,
    help="Seconds for running requests to end.",
)
@click.option(
    "--forget", is_flag=True, help="Drop the state even when something (a Ray that is away) cannot be asked."
)
def down(name: str | None, grace_s: float, forget: bool) -> None:
    """Stop a cluster and everything that was started for it."""
    from kvhive.scripts.teardown import interrupts_ignored, tear_down

    folder = _folder(name)
    with folder.lock():
        state = folder.load()
        if state is None:
            folder.remove()
            click.echo(f"no cluster {folder.cluster!r} is up; nothing to stop")
            return
        with interrupts_ignored():
            done = tear_down(folder, state, grace_s, forget)
    for line in done:
        click.echo(line)
    left = any(line.startswith("forgot") for line in done)
    click.echo(f"cluster {folder.cluster!r} is {'forgotten' if left else 'down; nothing of it is left'}")


@cli.command()
@cluster_option
@json_option
def status(name: str | None, as_json: bool) -> None:
    """Show the workers, their caches and the endpoints."""
    from kvhive.client import ONCE, Client
    from kvhive.scripts.cluster_access import operators_key
    from kvhive.scripts.control_socket import ask
    from kvhive.scripts.status_report import status_document, status_lines

    state = _folder(name).require()
    try:
        fleet = ask(Path(state.runtime_dir), {"do": "fleet"})
    except ClusterError:
        fleet = None  # the router knows most of it
    with Client(state.grpc, api_key=operators_key(state), retry=ONCE) as client:
        document = status_document(state, client.cluster(), fleet)
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(status_lines(document)))


@cli.command()
@cluster_option
@json_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds for its cache to be handed over and its streams to end; those that run on then move.",
)
@click.option("--no-handover", is_flag=True, help="Let its cache be forgotten.")
@click.argument("worker")
def drain(name: str | None, as_json: bool, timeout_s: float, no_handover: bool, worker: str) -> None:
    """Retire WORKER: no new requests, its hot cache to the others, its streams end or move.

    The cluster has one worker less afterwards, unless autoscaling brings another one.
    """
    from kvhive.scripts.drain_command import run_drain

    run_drain(_folder(name).require(), worker, timeout_s, not no_handover, as_json)


@cli.command()
@cluster_option
@json_option
@click.argument("workers", type=int)
def scale(name: str | None, as_json: bool, workers: int) -> None:
    """Have so many WORKERS from now on. Those that are too many drain, the least valuable caches first."""
    from kvhive.scripts.drain_command import run_scale

    run_scale(_folder(name).require(), workers, as_json)


@cli.command()
@cluster_option
@json_option
@sampling_flags
@click.argument("prompt")
def generate(name: str | None, as_json: bool, flags: SamplingFlags, prompt: str) -> None:
    """Continue PROMPT as plain text, without a chat template (`-` reads it from stdin)."""
    from kvhive.scripts import completion

    text = sys.stdin.read() if prompt == "-" else prompt
    completion.run(_folder(name).require(), completion.text_request(text, flags), as_json)


@cli.command()
@cluster_option
@json_option
@click.option("--workers", type=int, default=1, show_default=True, help="How many are to hold it.")
@click.option("--ttl", "ttl_s", type=float, default=None, help="Keep it so many seconds after its last use.")
@click.option("--system", default=None, help="PROMPT is a message after this system message.")
@click.option("--cache-salt", default="", help="Share cached blocks only with requests of this salt.")
@click.argument("prompt")
def prewarm(
    name: str | None,
    as_json: bool,
    workers: int,
    ttl_s: float | None,
    system: str | None,
    cache_salt: str,
    prompt: str,
) -> None:
    """Bring PROMPT (`-` reads it from stdin) into workers' caches, and return when it is there."""
    from kvhive.scripts import prewarm_command

    text = sys.stdin.read() if prompt == "-" else prompt
    wanted = prewarm_command.Wanted(text, system, cache_salt, workers, ttl_s)
    prewarm_command.run(_folder(name).require(), wanted, as_json)


@cli.command()
@cluster_option
@json_option
@click.argument("request_id")
def explain(name: str | None, as_json: bool, request_id: str) -> None:
    """Say why REQUEST_ID went where it did, as far back as the router remembers."""
    from kvhive.scripts import explain_command

    explain_command.run(_folder(name).require(), request_id, as_json)


@cli.command()
@cluster_option
@json_option
@sampling_flags
@click.option("--system", default="", help="The system message.")
@click.argument("message", required=False)
def chat(name: str | None, as_json: bool, flags: SamplingFlags, system: str, message: str | None) -> None:
    """Ask one MESSAGE, or hold a conversation when there is none (end it with Ctrl-D)."""
    from kvhive.scripts import completion

    state = _folder(name).require()
    if message is not None:
        turns = [("system", system)] * bool(system) + [("user", message)]
        completion.run(state, completion.chat_request(turns, flags), as_json)
    else:
        completion.converse(state, system, flags)


cli.add_command(keys)


@cli.group()
def bench() -> None:
    """Measure."""


@bench.command("engine")
@cluster_option
@click.option("--url", "urls", multiple=True, metavar="[NAME=]URL", help="An OpenAI-compatible server, too.")
@click.option("--only-urls", is_flag=True, help="Leave the cluster out.")
@click.option("--workload", "workloads", default="a,b,c,d", show_default=True, help="Which to send.")
@click.option("--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Times each.")
@click.option("--model", default="", help="The model to ask for; by default the first that a server names.")
@click.option("--seed", default="", help="Same seed, same prompts; by default a new one, which is printed.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 86_400),
    default=600.0,
    show_default=True,
    help="Seconds that one request may take.",
)
@click.option(
    "--pause",
    "pause_s",
    type=click.FloatRange(0, 3_600),
    default=5.0,
    show_default=True,
    help="Seconds before each run of several targets: who was just measured may go on spinning.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="All raw numbers.")
@click.option(
    "--png", "png_file", type=click.Path(dir_okay=False, path_type=Path), help="Bars of the ratios."
)
def bench_engine(name: str | None, urls: tuple[str, ...], only_urls: bool, **options: Any) -> int:
    """Send the same prompts to the cluster and to other servers, in turn, and compare.

    (a) a shared prefix of 1024 tokens, (b) decoding, (c) prompts of 2048 tokens, (d) one stream at a time.
    The exit status is 1 when any request failed.
    """
    from kvhive.scripts import bench_engine as command

    ours = None if only_urls else _folder(name).require().http
    addresses = command.parse_addresses(ours, urls)
    pause_s = options["pause_s"] if len(addresses) > 1 else 0.0
    plan = command.parse_plan(
        options["workloads"], options["runs"], options["seed"], options["timeout_s"], pause_s
    )
    outputs = command.Outputs(options["json_file"], options["png_file"])
    return command.run(addresses, options["model"], plan, outputs)


@bench.command("routing")
@click.option(
    "--peer-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A Python with ai-dynamo-runtime and pyzmq, to measure beside ours.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Times that the sides take turns.",
)
@click.option("--large", is_flag=True, help="An index of ten million blocks, too (3 GB, minutes).")
@click.option("--quick", is_flag=True, help="Small sizes, to see that it runs.")
@json_option
def bench_routing(peer_python: Path | None, rounds: int, large: bool, quick: bool, as_json: bool) -> None:
    """Measure decisions, look-ups and the index's events, without workers, models or GPUs."""
    from kvhive.scripts import bench_routing as command

    command.run(command.Plan(rounds, large, quick), peer_python, as_json)


@bench.command("proxy")
@click.option(
    "--peer", "peers", multiple=True, metavar="NAME=URL,PID[,MODEL]", help="Another router that runs, too."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Turns of each.")
@click.option("--quick", is_flag=True, help="Small numbers, to see that it runs.")
@json_option
def bench_proxy(peers: tuple[str, ...], rounds: int, quick: bool, as_json: bool) -> None:
    """Measure the way from worker to client, without models or GPUs: CPU for a token and for a request."""
    from kvhive.scripts import bench_proxy as command

    plan = command.Plan(rounds, 10, 0.005, 16) if quick else command.Plan(rounds)
    command.run(plan, [command.parse_peer(peer) for peer in peers], as_json)


@bench.command("transfer")
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=9,
    show_default=True,
    help="Times that the sides take turns.",
)
@click.option("--grid/--no-grid", default=True, show_default=True, help="Pull or compute, cell by cell.")
@click.option("--quick", is_flag=True, help="Few cells, to see that it runs.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Where pulling is faster.")
@json_option
def bench_transfer(rounds: int, grid: bool, quick: bool, png: Path | None, as_json: bool) -> None:
    """Measure how fast blocks move between workers, and whether pulling is chosen where it is faster.

    On workers of a random model of its own, on this machine; no cluster is needed.
    """
    from kvhive.scripts import bench_transfer as command

    command.run(command.Plan(rounds, quick, grid), png, as_json)


@cli.command()
@click.argument("trace")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="The policies as bars.")
@json_option
@simulate_flags
def simulate(trace: str, png: Path | None, as_json: bool, options: SimulateOptions) -> None:
    """Play TRACE on a simulated fleet under one routing policy or several (docs/simulate.md).

    TRACE is a file, or `diurnal[:key=value,...]`: a day that is made up. With --autoscale the fleet's size
    follows the load, under one policy (docs/autoscaling.md).
    """
    from kvhive.scripts import simulate as command

    command.run(trace, options, command.Outputs(as_json, png))


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"kvhive {installed_version('kvhive')}")


def _folder(name: str | None) -> StateFolder:
    return choose_cluster(state_root(os.environ), name)


if __name__ == "__main__":
    main()
