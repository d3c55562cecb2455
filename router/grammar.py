"""Checks what an output is asked to be, before anybody computes: a grammar that no worker could follow is
refused at once, in the library's words, and one that is made to be hard costs bounded time and memory.

Cheap bounds first, in the caller's terms; then a trial in another process (grammar_process.py). Verdicts are
kept, so that a schema that comes with every request is tried once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import pickle
import select
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.proto.json_schema import FIELD, exact_schema, read_schema
from kvhive.router.grammar_process import read_frame, write_frame
from kvhive.router.sampling_params import Grammar
from kvhive.router.token_vocabulary import token_vocabulary
from kvhive.router.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

MAX_VERDICTS = 1024
MAX_UNTRIED = 64
"""Grammars that wait for their trial; one more is refused."""
ANSWER_S = 30.0
"""Longest wait for the process, which bounds the computing itself: beyond that the machine is stuck."""


class GrammarCheck:
    """One per router, on its event loop. Its process begins with the first grammar, and again when lost."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar trials")  # which begins with the first work
        self._untried = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Callable[[], object] = lambda: None

    async def check(self, grammar: Grammar) -> None:
        """Return when workers can follow it. Raises InvalidRequest, Overloaded, Unavailable."""
        key = _key(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._new_verdict(grammar)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        if verdict:
            raise InvalidRequest(FIELD, verdict)

    async def _new_verdict(self, grammar: Grammar) -> str:
        if self._untried >= MAX_UNTRIED:
            raise Overloaded(f"{self._untried} grammars wait to be tried, the limit is {MAX_UNTRIED}")
        self._untried += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
        finally:
            self._untried -= 1

    def _try(self, grammar: Grammar) -> str:
        """In the thread: return why it cannot be followed; empty when it can."""
        if grammar.kind == "json_schema":
            try:
                exact_schema(read_schema(grammar.text))
            except InvalidRequest as error:
                return str(error).partition(": ")[2]
        try:
            inbox, outbox = self._pipes()
            write_frame(inbox, json.dumps([grammar.kind, grammar.text]).encode())
            return _answer(outbox).decode()
        except Exception as error:
            self._forget()  # whatever it was: an answer unread would be taken for the next grammar's
            if not isinstance(error, EOFError | OSError):
                raise
            log.warning("the process that tries grammars is lost: %r", error)
            raise Unavailable(
                "the grammar could not be tried; its process was lost", retry_after_s=1
            ) from error

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._process is None:
            command = [sys.executable, "-P", "-m", "kvhive.router.grammar_process"]
            vocabulary = token_vocabulary(self._tokenizer)
            if not vocabulary.ends:
                raise InvalidRequest(FIELD, "the model has no token by which an output ends")
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
            self._last = weakref.finalize(self, _end, process)
            assert process.stdin is not None and process.stdout is not None
            write_frame(process.stdin, pickle.dumps(vocabulary))
            _answer(process.stdout)
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _forget(self) -> None:
        self._last()
        self._process = None


def _key(grammar: Grammar) -> bytes:
    """Return what its verdict is kept by: its text may take half a megabyte."""
    return hashlib.blake2b(f"{grammar.kind} {grammar.text}".encode(), digest_size=32).digest()


def _answer(pipe: IO[bytes]) -> bytes:
    answers = select.poll()  # which, unlike select, takes any file: routers hold thousands
    answers.register(pipe, select.POLLIN)
    if not answers.poll(ANSWER_S * 1000):
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")
    return read_frame(pipe)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
