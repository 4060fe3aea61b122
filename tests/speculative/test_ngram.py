"""Guesses by suffix match are what a plain search finds, whatever was asked before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.speculative.ngram import NgramProposer

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def by_search(tokens: list[int], low: int, high: int, limit: int) -> list[int]:
    """The latest earlier occurrence of the longest suffix of `low` to `high` tokens, and what it is trusted for."""
    for size in range(high, low - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends and len(tokens) > size:
            end = ends[-1]
            matched = next(
                (m for m in range(end + 1) if m == end or tokens[end - m - 1] != tokens[len(tokens) - m - 1]), 0
            )
            more = tokens[end:]
            return [more[i % len(more)] for i in range(min(limit, matched))]
    return []


@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_guesses_are_those_of_a_plain_search(tokens, low, extra, limit):
    proposer = NgramProposer(low, low + extra)
    for length in range(1, len(tokens) + 1):
        assert proposer.propose(tokens[:length], limit) == by_search(tokens[:length], low, low + extra, limit)


@given(TOKENS, st.lists(st.integers(1, 5), max_size=20))
def test_what_was_asked_before_changes_no_guess(tokens, jumps):
    asked, length = NgramProposer(2, 4), 0
    for jump in jumps:
        length = min(len(tokens), length + jump)
        asked.propose(tokens[:length], 5)
    assert asked.propose(tokens, 5) == NgramProposer(2, 4).propose(tokens, 5)


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9]),  # two tokens match, so two are guessed
        ([7, 1, 2, 3, 9, 7, 1, 2], [3, 9, 7]),
        ([5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4], [5, 1, 2, 3, 4, 5]),  # longer than what is looked up
        ([4, 4, 4, 4], [4, 4, 4]),  # a match that ends at the last token goes on repeating
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_a_match_is_trusted_for_as_many_tokens_as_it_has(tokens, guesses):
    assert NgramProposer(2, 3).propose(tokens, 6) == guesses
