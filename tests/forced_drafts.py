"""Guesses of known quality: a proposer that knows the answer and is right as often as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samebit.core.request import Request


class ForcedDrafts:
    """`accepts[i]` right guesses in the i-th proposal, then wrong ones, also behind the answer's end.

    `answer()` gives all output tokens, and what would follow if it is known.
    """

    def __init__(self, request: Request, accepts: Sequence[int], answer: Callable[[], list[int]], vocab: int) -> None:
        self._request, self._accepts, self._answer, self._vocab = request, accepts, answer, vocab
        self._num_calls = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        count = self._accepts[self._num_calls % len(self._accepts)]
        self._num_calls += 1
        right = self._answer()[len(token_ids) - len(self._request.prompt_token_ids) :]
        wrong = [(token + 1) % self._vocab for token in right[count:]]
        return [*right[:count], *wrong, *([0] * limit)][:limit]
