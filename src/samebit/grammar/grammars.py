"""Grammars of requests, compiled once each. Knows requests and the vocabulary; no sequences, steps or text of answers."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from samebit.core.errors import InvalidRequestError
from samebit.core.reply import MessageFormat
from samebit.core.request import Request
from samebit.core.structured import StructuredOutputsParams
from samebit.grammar.definition import Definition, define, part_name
from samebit.grammar.matcher import GrammarCounts, Matcher, reason_of
from samebit.grammar.vocabulary import Vocabulary

_MAX_COMPILED = 64
# Requests whose grammars are kept as text from when they were first asked about until they get their matcher.
_MAX_DEFINED = 64
# The compiler calls itself for each level: the worst that a wish of 256 KiB can hold took less than a third. Unused, it costs nothing.
_STACK_BYTES = 512 << 20
# The size of a new thread's stack is a setting of the process: two who change it and put it back must not overlap.
_STACK_SIZE = threading.Lock()
# Compile times that are kept until somebody takes them.
_MAX_TIMES = 1 << 10
# What one token of one request may cost: grammars that are more ambiguous than this end with an error of their own.
_LIMITS = {
    "initial_lexer_fuel": 50_000,  # what a token may cost grows with it: the worst found took some 50 ms
    "max_items_in_row": 4_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    # No limit: what others have found out takes no fuel, so an answer must not end by it. States end it, and how many a request needs is its own.
    "step_lexer_fuel": 2_000_000_000,
    "max_grammar_size": 30_000,
    "verbose_errors": False,  # they would hold text of answers
}


class Grammars:
    """Owner of what has been compiled of late. `prepare` may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.counts = GrammarCounts()
        self._vocabulary = vocabulary
        self._free = vocabulary.free()
        self._format = MessageFormat.of(vocabulary.special_tokens)
        # What a grammar's text has come to: a matcher at its beginning, or why there is none.
        self._compiled: OrderedDict[str, LLMatcher | str] = OrderedDict()
        # By the identity of requests, which are held here so that it stays theirs.
        self._defined: OrderedDict[int, tuple[Request, Definition, str]] = OrderedDict()
        self._compile_times_s: deque[float] = deque(maxlen=_MAX_TIMES)
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    def is_ready(self, request: Request) -> bool:
        """Whether `matcher` has nothing to compile for `request`."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return True
        try:
            _, text = self._define(request, wanted)
        except InvalidRequestError:
            return True
        with self._lock:
            return text in self._compiled

    def prepare(self, request: Request) -> None:
        """Compile what `request` asks for, so that `matcher` finds it. InvalidRequestError says why that cannot be."""
        wanted = request.params.structured_outputs
        if wanted is not None:
            self._find(wanted, *self._define(request, wanted))

    def matcher(self, request: Request) -> Matcher | None:
        """The way through the grammar of `request`, at its beginning; None if it asks for none. Raises as `prepare`."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return None
        definition, text = self._define(request, wanted)
        with self._lock:
            self._defined.pop(id(request), None)
        found = self._find(wanted, definition, text)
        return Matcher(found.deep_copy(), self._vocabulary.size, self.counts, partial(self._begin_again, text))

    def take_compile_times(self) -> list[float]:
        """Seconds of the compilations since the last call."""
        with self._lock:
            times = list(self._compile_times_s)
            self._compile_times_s.clear()
        return times

    def _define(self, request: Request, wanted: StructuredOutputsParams) -> tuple[Definition, str]:
        """The grammar of a request and its text, which is made once and may be long."""
        with self._lock:
            if (known := self._defined.get(id(request))) is not None:
                return known[1:]
        definition = define(wanted, request.prompt_token_ids, request.eos_token_ids, self._format, self._free)
        text = definition.text()
        with self._lock:
            self._defined[id(request)] = request, definition, text
            if len(self._defined) > _MAX_DEFINED:
                self._defined.popitem(last=False)
        return definition, text

    def _find(self, wanted: StructuredOutputsParams, definition: Definition, text: str) -> LLMatcher:
        """The matcher that all who want this grammar begin with a copy of; compiled if it is not kept."""
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
        if found is None:
            found = self._compile(definition, wanted, text)
        if isinstance(found, str):
            raise InvalidRequestError(f"{wanted.field}: {found}", param=wanted.field)
        return found

    def _tokenizer(self) -> LLTokenizer:
        """Made once, when the first grammar needs it; whoever comes meanwhile waits."""
        with self._making:
            self._made = self._made or self._vocabulary.tokenizer()
            return self._made

    def _compile(self, definition: Definition, wanted: StructuredOutputsParams, text: str) -> LLMatcher | str:
        """A matcher at the beginning of a grammar, or why there is none."""
        begin = time.perf_counter()
        compiled = self._new_matcher(text)
        fault = self._fault(compiled.deep_copy())
        # What a caller has written may turn out not to be followed only where it begins, behind thinking.
        for part in definition.parts:
            alone = self._fault(self._new_matcher(json.dumps({"grammars": [part]})))
            if alone:
                fault = f"{part_name(wanted, part)}: {alone}"
                break
        found = fault or compiled
        elapsed = time.perf_counter() - begin
        with self._lock:
            self.counts.num_compiled += 1
            self._compile_times_s.append(elapsed)
            self._compiled[text] = found
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _begin_again(self, text: str) -> LLMatcher:
        """A matcher that shares nothing, as the one that is kept has come to its limits; the next request has it compiled anew."""
        with self._lock:
            self._compiled.pop(text, None)
        return self._new_matcher(text)

    def _fault(self, matcher: LLMatcher) -> str | None:
        """Why a grammar cannot be followed from its beginning on."""
        if matcher.is_error():
            return reason_of(matcher.get_error())
        first = Matcher(matcher, self._vocabulary.size, self.counts)
        return first.error or ("only an empty text is allowed" if first.is_over else None)

    def _new_matcher(self, text: str) -> LLMatcher:
        limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]  # numbers and a truth value, by name
        return _on_deep_stack(lambda: LLMatcher(self._tokenizer(), text, log_level=0, limits=limits))


def _on_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of `work`, in a thread of its own with room for all levels of a grammar: who runs out of it ends the process."""
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        with _STACK_SIZE:
            usual_bytes = threading.stack_size(_STACK_BYTES)
            try:
                future = pool.submit(work)
            finally:
                threading.stack_size(usual_bytes)
        return future.result()
