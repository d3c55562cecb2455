"""Redis as operators run it: a cluster of one node, a pair under a sentinel, and one behind TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from kvhive.scripts.embedded_redis import find_server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(folder: Path, *options: str, config: str = "", port: int = 0) -> Iterator[redis.Redis]:
    """Run a server with these lines of configuration; yields a client of it."""
    folder.mkdir()
    port = port or free_port()
    file = folder / "redis.conf"
    file.write_text(f"bind 127.0.0.1\nport {port}\ndir {folder}\nsave ''\n{config}\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([find_server(), str(file), *options], stdout=log, stderr=log)
    client = redis.Redis(host="127.0.0.1", port=port, socket_timeout=2.0)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def port_of(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """One node that owns every slot; yields its URL. A node refuses a script whose keys differ in their slot,
    however many nodes there are."""
    lines = "cluster-enabled yes\ncluster-node-timeout 2000\n"
    with server(folder, config=lines) as node:
        node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + 10
        while "ok" not in str(node.cluster("INFO")).partition("cluster_state")[2][:10]:
            assert time.monotonic() < deadline, node.cluster("INFO")
            time.sleep(0.02)
        yield f"redis+cluster://127.0.0.1:{port_of(node)}"


@contextlib.contextmanager
def sentinel(folder: Path) -> Iterator[tuple[str, redis.Redis, redis.Redis, redis.Redis]]:
    """A master, its replica and one sentinel; yields the URL and a client of the three."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(server(folder / "master"))
        follow = f"replicaof 127.0.0.1 {port_of(master)}"
        replica = stack.enter_context(server(folder / "replica", config=follow))
        watch = (
            f"sentinel monitor main 127.0.0.1 {port_of(master)} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        watcher = stack.enter_context(server(folder / "sentinel", "--sentinel", config=watch))
        yield f"redis+sentinel://127.0.0.1:{port_of(watcher)}/main", master, replica, watcher


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, which is its own authority."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run(
        [*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return key, certificate


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, key: Path, certificate: Path) -> AsyncIterator[int]:
    """Terminate TLS as a proxy does, since the server's binary may be built without; yields the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with proxy:
        yield int(proxy.sockets[0].getsockname()[1])
