"""The file of API keys, read again when it changes: a key that was revoked is refused within a second.

A file that cannot be read, or has a bad line, changes nothing: the keys from before stay in force, the log
says why and a counter goes up. Only a router that starts with such a file refuses to.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from kvhive.proto.errors import ConfigError
from kvhive.router.auth.key_list import MAX_FILE_BYTES, KeyList, parse_keys

log = logging.getLogger(__name__)

POLL_S = 0.5


class KeyFile:
    """Follows one file. For one event loop."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises ConfigError."""
        self._path = path
        self._seen = self._signature()
        self.keys = read_keys(path)
        """What is in force."""
        self.failures = 0
        """Changes that could not be taken over."""

    async def run(self, poll_s: float = POLL_S) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again if it is another one."""
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.keys = read_keys(self._path)
        except ConfigError as error:
            self.failures += 1
            log.error("keys unchanged keys=%d error=%s", len(self.keys), error)
            return
        log.info("keys read again keys=%d", len(self.keys))

    def _signature(self) -> tuple[int, ...]:
        """Return what differs when the file was written, or replaced by another."""
        try:
            found = os.stat(self._path)
        except OSError as error:
            return (error.errno or 0,)
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> KeyList:
    """Read a file of keys. Raises ConfigError naming it, and the line."""
    try:
        return parse_keys(read_text(path))
    except ConfigError as error:
        raise ConfigError(f"access.keys_file: {path}: {error}") from error


def read_text(path: Path) -> str:
    """Return a file's text, if it is not too long. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"must have at most {MAX_FILE_BYTES} bytes")
        return raw.decode()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"must be UTF-8: {error.reason} at byte {error.start}") from error
