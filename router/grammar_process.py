"""A process that tries grammars, each in a fork of its own with so much computing and memory and no more.

The library compiles a usual schema in a millisecond, and has no bound for what is made to be hard: one number
in a schema may take minutes. What has no bound in a thread has one in a process. The router speaks to it
through its pipes, in frames of a length and JSON; the vocabulary comes first. It ends when the pipe does.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import in_short, new_matcher
from kvhive.proto.token_vocabulary import TokenVocabulary, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_CPU_S = 2
"""Computing that one grammar may take: a thousand times what a usual one does."""
COMPILE_BYTES = 512 * 1024 * 1024
"""Memory that it may take, on top of the vocabulary's."""
_NICE = 5
"""Others compute answers meanwhile."""
_LENGTH = struct.Struct("<I")
_SAID_WHY = 3
"""The exit status of a fork that has refused a grammar."""


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Send one message."""
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes:
    """Return the next message. Raises EOFError where the other side has gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


def main() -> None:
    """Serve until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the router's to end
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    try:
        vocabulary: TokenVocabulary = pickle.loads(read_frame(inbox))
        tokenizer = make_tokenizer(vocabulary)
        write_frame(outbox, b"")
        while True:
            kind, text = json.loads(read_frame(inbox))
            write_frame(outbox, _tried(tokenizer, kind, text).encode())
    except (EOFError, BrokenPipeError):
        return


def _tried(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    """Return why a grammar cannot be followed; empty when it can."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _try(tokenizer, kind, text, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, _SAID_WHY):
        return said
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"the grammar takes more than {COMPILE_CPU_S} s of computing to compile"
    return f"the grammar takes more than {COMPILE_BYTES >> 20} MiB of memory to compile, or is too deep"


def _try(tokenizer: LLTokenizer, kind: str, text: str, writing: int) -> None:
    """In the fork: compile and look at what may come first, then end."""
    status, said = 1, ""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a library that dies says so
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_CPU_S, COMPILE_CPU_S + 1))
        matcher = new_matcher(tokenizer, kind, text)
        matcher.compute_bitmask()
        if matcher.try_consume_tokens(tokenizer.greedy_tokenize('{"')):  # where there are many ways on
            matcher.compute_bitmask()
        if matcher.is_error():
            said = f"it cannot be followed: {in_short(matcher.get_error())}"
        status = _SAID_WHY if said else 0
    except InvalidRequest as error:
        status, said = _SAID_WHY, str(error).partition(": ")[2]
    finally:  # whatever it was, a fork does not go on as what it was forked from
        os.write(writing, said.encode())
        os._exit(status)


if __name__ == "__main__":
    main()
