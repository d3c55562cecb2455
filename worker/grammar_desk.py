"""Gives sequences their matchers before the engine sees them: compiling a grammar must hold up no step."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError
from kvhive.proto.grammar import new_matcher
from kvhive.proto.json_schema import FIELD
from kvhive.proto.token_vocabulary import TokenVocabulary, make_tokenizer
from kvhive.worker.engine import Output
from kvhive.worker.output_matcher import OutputMatcher
from kvhive.worker.sequence import Grammar, Sequence

if TYPE_CHECKING:  # a worker that is never asked for a grammar needs no such library
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

MAX_COMPILED = 16
"""Grammars that are kept ready; those of running answers live as long as these. Mostly they take some MB."""


class GrammarDesk:
    """Lives on the service's event loop; compiles in a thread of its own, one grammar after the other."""

    def __init__(self, load: Callable[[], TokenVocabulary] | None) -> None:
        """Know tokens by what `load` returns; without it every grammar is refused."""
        self._load = load
        self._failure: KvhiveError | None = None
        self._words: tuple[LLTokenizer, int, frozenset[int]] | None = None
        self._compiled: OrderedDict[Grammar, OutputMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")  # which begins with the first work

    def load(self) -> Future[None]:
        """Begin to load the vocabulary, before anything runs that this would hold up.

        What fails is told to whoever asks for a grammar: all others can be served.
        """
        return self._thread.submit(self._load_once)

    def close(self) -> None:
        """Take no more work; what is being compiled ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(
        self,
        sequences: ReadOnly[Sequence],
        submit: Callable[[Sequence], None],
        tell: Callable[[Output], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Submit a request's sequences, at once where they have no grammar; else when they have matchers.

        When the grammar cannot be followed, `tell` hears that instead; and nobody hears anything of a request
        that has gone and is not `wanted` any more.
        """
        grammar = sequences[0].sampling.grammar
        if grammar is None:
            for seq in sequences:
                submit(seq)
            return
        loop = asyncio.get_running_loop()

        def refuse(error: KvhiveError) -> None:
            tell(Output(sequences[0].request_id, error=error))

        def prepared(matching: asyncio.Future[None]) -> None:
            if matching.cancelled():
                return
            error = matching.exception()  # asked for in any case, or asyncio logs that nobody did
            if not wanted():
                return
            if error is None:
                for seq in sequences:
                    submit(seq)
            elif isinstance(error, KvhiveError):
                refuse(error)
            else:
                log.error("a grammar could not be compiled kind=%s", grammar.kind, exc_info=error)
                refuse(ComputeError(f"{FIELD}: the grammar could not be compiled: {error!r}"))

        loop.run_in_executor(self._thread, self._match, grammar, sequences).add_done_callback(prepared)

    def _match(self, grammar: Grammar, sequences: ReadOnly[Sequence]) -> None:
        """Give each sequence a matcher that has followed what an earlier worker generated."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        for seq in sequences:
            matcher = compiled.fork()
            matcher.follow(seq.tokens[seq.prompt_tokens :])
            seq.matcher = matcher

    def _compile(self, grammar: Grammar) -> OutputMatcher:
        self._load_once()
        if self._words is None:
            raise self._failure or InvalidRequest(FIELD, "this worker knows no text of its tokens")
        tokenizer, size, ends = self._words
        return OutputMatcher(new_matcher(tokenizer, grammar.kind, grammar.text), size, ends)

    def _load_once(self) -> None:
        if self._words is not None or self._failure is not None or self._load is None:
            return
        try:
            vocabulary = self._load()
            if vocabulary.ends:
                size, ends = len(vocabulary.tokens), frozenset(vocabulary.ends)
                self._words = make_tokenizer(vocabulary), size, ends
            else:
                self._failure = InvalidRequest(FIELD, "the model has no token by which an output ends")
        except (KvhiveError, ImportError) as error:
            log.warning("no grammar can be followed here: %s", error)
            self._failure = ComputeError(f"{FIELD}: the vocabulary cannot be loaded: {error}")
