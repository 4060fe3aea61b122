"""What a request changes in the logits before a token is drawn: bans, biases and penalties, of its own tokens alone.

A pure function of the parameters and of the tokens before the one to be drawn, so that batch, chunks, hits, guesses and
preemption have no part in it. Knows no sequence and no step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Self

from samebit.core.plan import BANNED_LOGIT, LogitEdits
from samebit.core.request import Request, SamplingParams

_NONE = LogitEdits()


class LogitRules:
    """The bias and penalties of one request; immutable. The formula is in docs/sampling.md."""

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
        self._counts_output = bool(self._presence or self._frequency or self._repetition != 1)
        self._prompt = frozenset(prompt) if self._repetition != 1 else frozenset[int]()

    def edits(self, output: Sequence[int], banned: Iterable[int] = ()) -> LogitEdits:
        """The edits of the token behind `output`, the tokens drawn so far; `banned` ones are not drawn."""
        counts = Counter(output) if self._counts_output else Counter[int]()
        bias, presence, frequency = self._bias, self._presence, self._frequency
        shifts = bias | {token: bias.get(token, 0.0) - presence - frequency * count for token, count in counts.items()}
        shifts |= dict.fromkeys(banned, BANNED_LOGIT)
        if self._repetition == 1:
            return LogitEdits([*shifts], [1.0] * len(shifts), [*shifts.values()])
        repeated = self._prompt | counts.keys()
        shifts |= dict.fromkeys(repeated - shifts.keys(), 0.0)
        penalties = [self._repetition if token in repeated else 1.0 for token in shifts]
        return LogitEdits([*shifts], penalties, [*shifts.values()])


def banning(token_ids: Collection[int]) -> LogitEdits:
    """The edits of a draw of which all is left as it is but for `token_ids`, which are not drawn."""
    if not token_ids:
        return _NONE
    return LogitEdits([*token_ids], [1.0] * len(token_ids), [BANNED_LOGIT] * len(token_ids))
