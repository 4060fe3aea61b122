"""Guesses by suffix match: what followed the last tokens where they stood before, in the prompt or the output.

A match of m tokens is trusted for m guesses: long matches go on, and short ones are mostly chance (docs/speculation.md).
Knows token ids only. Every proposer keeps an index of its own sequence, to which each call adds the new tokens.
"""

from __future__ import annotations

from samebit.core.request import Request
from samebit.speculative.host import HostDrafter


class NgramProposer:
    """Looks up the longest suffix of `max_n` down to `min_n` tokens that occurred before, latest occurrence first."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        # Where the latest occurrence of each n-gram ended that has a token behind it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """The tokens behind the match, at most as many as it has and `limit`; none without a match."""
        self._index(token_ids)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[-size:])) if len(token_ids) > size else None
            if end is not None:
                return self._continuation(token_ids, end, min(limit, _match_length(token_ids, end, size, limit)))
        return []

    def _index(self, token_ids: list[int]) -> None:
        """Take in all n-grams that end before the last token."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)

    def _continuation(self, token_ids: list[int], end: int, limit: int) -> list[int]:
        """What follows `end`; where the sequence ends, as if the stretch behind the match went on repeating."""
        period = len(token_ids) - end
        return [token_ids[end + i % period] for i in range(limit)]


def _match_length(token_ids: list[int], end: int, size: int, limit: int) -> int:
    """How many of the last tokens also stand before `end`: at least `size`, counted up to `limit`."""
    while size < min(limit, end) and token_ids[end - size - 1] == token_ids[-size - 1]:
        size += 1
    return size


def ngram_drafter(min_n: int, max_n: int) -> HostDrafter:
    """A drafter of suffix matches of `min_n` to `max_n` tokens."""

    def begin(_request: Request) -> NgramProposer:
        return NgramProposer(min_n, max_n)

    return begin
