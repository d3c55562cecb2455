"""Starts a module of ours as a process that outlives whoever started it, with a log of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def launch_module(module: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`, away from any terminal, and wait for nothing."""
    with open(log, "ab") as output:
        # -P: the current directory must not shadow installed packages.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
