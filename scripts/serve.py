"""The router's process: `python -m kvhive.scripts.serve <router.json>`, as `kvhive up` runs it.

SIGTERM and SIGINT let running streams end within the grace (stop_grace.py) and then close; a second one ends
at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from importlib.metadata import version
from pathlib import Path

from kvhive.proto.config import parse_config
from kvhive.proto.errors import KvhiveError
from kvhive.router.app import RouterOptions, run_router
from kvhive.router.doors import RouterEndpoints
from kvhive.scripts.router_process import ReadyRouter, RouterSpec
from kvhive.scripts.stop_grace import read_grace

OPEN_FILES = 65_536
"""For all connections that both doors take (4096 each), and those to workers. The usual 1024 are too few."""
COLLECT_AFTER = 20_000
"""Objects that were made and are still there, before the garbage collector looks among them for cycles."""


def main(arguments: list[str]) -> int:
    """Run a router until it is told to stop; return the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="time=%(asctime)s level=%(levelname)s at=%(name)s %(message)s"
    )
    # A prompt is one task for the library, and threads of its own to share it out cost more than a short one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if len(arguments) != 1:
        print("usage: python -m kvhive.scripts.serve <router.json>", file=sys.stderr)
        return 2
    _allow_open_files()
    spec = RouterSpec.load(Path(arguments[0]))
    try:
        asyncio.run(_run(spec))
    except KvhiveError as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0


def _allow_open_files() -> None:
    """Raise the soft limit as far as the hard one lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(spec: RouterSpec) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)  # the next one ends the process by itself

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop, number)

    def ready(endpoints: RouterEndpoints) -> None:
        ReadyRouter(grpc=endpoints.grpc, http=endpoints.http).save(Path(spec.ready_file))
        # What is here by now stays, and what requests leave is mostly freed at once, without the collector.
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER)

    options = RouterOptions(
        config=parse_config(spec.config),
        redis_url=spec.redis_url,
        cluster_token=spec.cluster_token,
        model_path=Path(spec.model_path),
        model_name=spec.model_name,
        model_identity=bytes.fromhex(spec.model_identity),
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        version=version("kvhive"),
    )
    runtime_dir = Path(spec.ready_file).parent
    await run_router(options, ready, stop, grace_s=lambda: read_grace(runtime_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
