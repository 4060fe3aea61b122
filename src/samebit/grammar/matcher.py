"""Which tokens an answer may go on with: one request's way through its grammar. Knows token ids; no logits and no steps.

A mask has a bit for each token, as in LogitEdits. It is a function of the grammar and the tokens so far alone, so who
guessed them, and how many at a time, has no part in it. Nor has who else follows the same grammar: copies share what their lexer has
found out, and its limits, so where one ends that way, a matcher of its own is led along the same tokens, and only its end counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

_MAX_REASON_CHARS = 500


@dataclass(slots=True)
class GrammarCounts:
    """What grammars have cost since the start: `mask_s` are the seconds that masks took, with what they take of tokens."""

    num_compiled: int = 0
    num_masks: int = 0
    mask_s: float = 0.0

    def totals(self) -> dict[str, float]:
        """All by name."""
        return {
            "num_grammars_compiled": self.num_compiled,
            "num_grammar_masks": self.num_masks,
            "grammar_mask_seconds": self.mask_s,
        }


class Matcher:
    """Owned by one request; mutable. `error` says why its grammar allows no token where it should."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, counts: GrammarCounts, begin: Callable[[], LLMatcher] | None = None
    ) -> None:
        """Take `matcher` over, which has a token more than the vocabulary: the end of the grammar. `begin` makes another that shares nothing."""
        self._matcher, self._vocab_size, self._counts, self._begin = matcher, vocab_size, counts, begin
        self._tokens: list[int] = []
        self._guesses: list[int] = []
        self._masks: list[bytes] = []
        self.is_over = False
        self.error: str | None = None
        self._look()

    def accept(self, token_id: int) -> None:
        """Take in a token that was drawn. Afterwards the grammar `is_over`, or there is an `error`, or a token is allowed."""
        begin = time.perf_counter()
        self._tokens.append(token_id)
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._begin_again()
        is_foreseen = self._guesses[:1] == [token_id] and len(self._masks) > 1 and not self._matcher.is_error()
        self._guesses, self._masks = (self._guesses[1:], self._masks[1:]) if is_foreseen else ([], [])
        self._counts.mask_s += time.perf_counter() - begin
        if not self._masks:
            self._look()

    def masks(self, guesses: Sequence[int]) -> list[bytes]:
        """Masks for the next token, and for the one behind each of `guesses`; empty behind one that cannot come to be accepted."""
        if self._guesses[: len(guesses)] != list(guesses) or len(self._guesses) < len(guesses):
            self._walk(guesses)
        found = self._masks[: len(guesses) + 1]
        return found + [b""] * (len(guesses) + 1 - len(found))

    def num_allowed(self, guesses: Sequence[int]) -> int:
        """How many of `guesses`, from the first on, the grammar allows, and a token behind them."""
        return sum(map(bool, self.masks(guesses))) - 1

    def _walk(self, guesses: Sequence[int]) -> None:
        """Find the masks behind `guesses`, on a copy: what cannot be taken spoils it."""
        begin = time.perf_counter()
        self._guesses, self._masks = list(guesses), self._masks[:1]
        scout = self._matcher.deep_copy()
        for token_id in guesses:
            if not is_allowed(self._masks[-1], token_id) or not scout.consume_token(token_id):
                break
            mask = self._mask(scout)
            if scout.is_error() or is_empty(mask):
                break
            self._masks.append(mask)
        self._counts.mask_s += time.perf_counter() - begin

    def _look(self) -> None:
        """Find the mask of the next token."""
        begin = time.perf_counter()
        mask = self._mask(self._matcher)
        if self._matcher.is_error():
            self._begin_again()
            mask = self._mask(self._matcher)
        self._guesses, self._masks = [], [mask]
        if self._matcher.is_error():
            self.error = reason_of(self._matcher.get_error())
        elif is_empty(mask):
            self.is_over = self._matcher.is_accepting()
            self.error = None if self.is_over else "no token is allowed"
        self._counts.mask_s += time.perf_counter() - begin

    def _begin_again(self) -> None:
        """Lead a matcher that shares nothing along the tokens so far, with a mask before each: what masks take counts, too."""
        if self._begin is not None:
            self._matcher = self._begin()
            for token_id in self._tokens:
                self._matcher.compute_bitmask()
                self._matcher.consume_token(token_id)

    def _mask(self, matcher: LLMatcher) -> bytes:
        """The mask of the next token, without the end of the grammar."""
        self._counts.num_masks += 1
        mask = matcher.compute_bitmask()
        place, bit = divmod(self._vocab_size, 8)
        size = -(-self._vocab_size // 32) * 4
        return without(mask, [self._vocab_size])[:size] if mask[place] >> bit & 1 else mask[:size]


def is_empty(mask: bytes) -> bool:
    """Whether a mask allows no token."""
    return mask == bytes(len(mask))


def is_allowed(mask: bytes, token_id: int) -> bool:
    """Whether a mask has the bit of a token."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def without(mask: bytes, token_ids: Collection[int]) -> bytes:
    """`mask` without the bits of some tokens."""
    bits = bytearray(mask)
    for token_id in token_ids if mask else ():
        bits[token_id // 8] &= 0xFF ^ (1 << token_id % 8)
    return bytes(bits)


def reason_of(text: str) -> str:
    """A message of the library's as part of one of ours: on one line, and not too long."""
    if text.startswith("NoExtension"):
        return "no token is allowed"
    lines = [line.strip() for line in text.partition("<backtrace>")[0].splitlines()]
    return " ".join(line for line in lines if line and line != "<non-verbose/>")[:_MAX_REASON_CHARS]
