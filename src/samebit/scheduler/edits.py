"""What a request changes in the logits before a token is drawn: bans, biases and penalties, of its own tokens alone.

A function of the parameters and of the tokens before the one to be drawn, so that batch, chunks, hits, guesses and preemption
have no part in it. Knows no sequence and no step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Self

from samebit.core.plan import BANNED_LOGIT, LogitEdits
from samebit.core.request import Request, SamplingParams

NO_EDITS = LogitEdits()


class _Columns:
    """Tokens, each once, with their penalties and shifts, both as fp32."""

    def __init__(self, tokens: array[int], penalties: array[float], shifts: array[float]) -> None:
        self.tokens, self.penalties, self.shifts = tokens, penalties, shifts

    def copy(self) -> _Columns:
        """Columns that change by themselves."""
        return _Columns(self.tokens[:], self.penalties[:], self.shifts[:])

    def put(self, place: int | None, token: int, penalty: float, shift: float) -> int:
        """Write a token at `place`, or behind all others; its place."""
        if place is None:
            self.tokens.append(token)
            self.penalties.append(penalty)
            self.shifts.append(shift)
            return len(self.tokens) - 1
        self.penalties[place], self.shifts[place] = penalty, shift
        return place


class LogitRules:
    """The bias and penalties of one request, and what follows from the tokens that it has drawn. The formula is in docs/sampling.md.

    A token that is taken in changes one edit, so that a draw costs no more than a copy however long the answer is; none if the edits
    do not depend on what was drawn (`counts_output`).
    """

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """The rules of `request`; None if it asks for nothing."""
        params = request.params
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        is_neutral = penalties == (0.0, 0.0, 1.0) and not params.logit_bias
        return None if is_neutral else cls(params, request.prompt_token_ids)

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._repetition = params.repetition_penalty
        self._bias = dict(params.logit_bias or {})
        self.counts_output = bool(self._presence or self._frequency or self._repetition != 1)
        self._prompt = frozenset(prompt) if self._repetition != 1 else frozenset[int]()
        self._counts = Counter[int]()
        self._columns = _Columns(array("i"), array("f"), array("f"))
        self._places: dict[int, int] = {}
        for token in dict.fromkeys([*self._bias, *self._prompt]):
            self._places[token] = self._columns.put(None, token, *self._edit(token, 0))

    def take(self, token: int) -> None:
        """Take in a token that was drawn."""
        if self.counts_output:
            self._counts[token] += 1
            place = self._places.get(token)
            self._places[token] = self._columns.put(place, token, *self._edit(token, self._counts[token]))

    def edits(self, guesses: Sequence[int] = (), banned: Iterable[int] = ()) -> LogitEdits:
        """The edits of the token behind all that were taken in and `guesses`, which are not; `banned` ones are not drawn."""
        columns, places = self._columns.copy(), dict[int, int]()
        for token, count in Counter(guesses).items() if self.counts_output else ():
            edit = self._edit(token, self._counts[token] + count)
            places[token] = columns.put(self._places.get(token), token, *edit)
        for token in banned:
            place = places.get(token, self._places.get(token))
            columns.put(place, token, 1.0 if place is None else columns.penalties[place], BANNED_LOGIT)
        return LogitEdits(columns.tokens, columns.penalties, columns.shifts)

    def _edit(self, token: int, count: int) -> tuple[float, float]:
        """Penalty and shift of a token that was drawn `count` times."""
        shift = self._bias.get(token, 0.0)
        if count:
            shift = shift - self._presence - self._frequency * count
        return self._repetition if count or token in self._prompt else 1.0, shift


def banning(token_ids: Collection[int]) -> LogitEdits:
    """The edits of a draw of which all is left as it is but for `token_ids`, which are not drawn."""
    if not token_ids:
        return NO_EDITS
    return LogitEdits([*token_ids], [1.0] * len(token_ids), [BANNED_LOGIT] * len(token_ids))
