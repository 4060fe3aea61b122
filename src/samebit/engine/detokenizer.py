"""Streams text out of token ids, holding back what may still change, and finds stop strings.

Knows bytes and characters. Does not know requests, finish reasons or stop token ids.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from samebit.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed.

    `num_tokens` counts the tokens pushed, up to and with the one that completed `stop_string`.
    """

    stop_string: str
    num_tokens: int


class StopAutomaton:
    """Finds any of many strings in a character stream (Aho and Corasick, CACM 18(6), 1975).

    States are numbers, 0 is the start. Immutable: requests with the same stop strings may share
    one. Building takes time and memory in proportion to the total length of the strings.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Take any number of non-empty strings."""
        assert all(stop_strings), "stop strings are not empty"
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self._held = [0]
        for string in stop_strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._match.append(None)
                self._held.append(depth)
            state = self._next[state][character]
        self._match[state] = string

    def _link(self) -> None:
        """Breadth first, so that the state a failure leads to is always complete."""
        queue = [0]
        for state in queue:
            for character, child in self._next[state].items():
                queue.append(child)
                fail = self.step(self._fail[state], character) if state else 0
                self._fail[child] = fail
                # Its own string is the longest that ends here; shorter ones come from the suffix.
                self._match[child] = self._match[child] or self._match[fail]
                if not self._next[child]:
                    self._held[child] = self._held[fail]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def match(self, state: int) -> str | None:
        """The longest stop string that ends here, if any does."""
        return self._match[state]

    def held(self, state: int) -> int:
        """How many of the last characters may still become part of a stop string."""
        return self._held[state]


class IncrementalDetokenizer:
    """Text of one answer, token by token. Owned by one request; mutable.

    The concatenated deltas equal `Tokenizer.decode` of all tokens, cut at the stop: the stop
    string that *ends* first wins, of several that end at the same character the longest.
    Tokens after the stop must not be pushed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: StopAutomaton | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop` keeps the stop string in the text; one that ends before token number
        `min_tokens + 1` is passed over.
        """
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = 0
        self._pending = ""
        self.num_tokens = 0
        self.match: StopMatch | None = None

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain (often empty)."""
        assert self.match is None, "the answer has ended"
        self.num_tokens += 1
        if token_id in self._skipped:
            return ""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def pass_over(self) -> None:
        """Count a token that is no part of the text."""
        self.num_tokens += 1

    def cut(self) -> str:
        """No character goes on beyond here: an unfinished one becomes U+FFFD. Return the text that is now certain."""
        return "" if self.match is not None else self._emit(self._decoder.decode(b"", final=True))

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD.

        After a stop there is nothing left. That U+FFFD may itself complete a stop string.
        """
        if self.match is not None:
            return ""
        text = self._emit(self._decoder.decode(b"", final=True))
        if self.match is None:
            text += self._pending
        self._pending = ""
        return text

    def _emit(self, text: str) -> str:
        if self._stop is None or not text:
            return text
        text, start = self._pending + text, len(self._pending)
        for index in range(start, len(text)):
            self._state = self._stop.step(self._state, text[index])
            found = self._stop.match(self._state)
            if found is not None and self.num_tokens > self._min_tokens:
                self.match = StopMatch(found, self.num_tokens)
                end = index + 1
                return text[: end if self._include_stop else end - len(found)]
        certain = len(text) - self._stop.held(self._state)
        self._pending = text[certain:]
        return text[:certain]
