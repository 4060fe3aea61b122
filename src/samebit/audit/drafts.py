"""Who guesses tokens in an audit's arms: the drafter of the settings, or one that knows the reference's answers.

The second makes sure that rows of guesses are accepted, in whole and in part, whatever the model says.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebit.audit.compare import Reference
from samebit.audit.recording import AuditPrompt
from samebit.core.config import SpeculativeConfig
from samebit.core.request import Request
from samebit.speculative.host import HostDrafter

# An audit wants many guesses rather than good ones: short suffixes find more, and all are verified.
DEFAULT = SpeculativeConfig(method="ngram", prompt_lookup_min=1, token_cost=0.0)
SPOIL_PERCENT = 30

_Key = tuple[tuple[int, ...], int, int]


class _Told:
    """Guesses the rest of an answer that is known."""

    def __init__(self, num_prompt: int, answer: list[int]) -> None:
        self._num_prompt = num_prompt
        self._answer = answer

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """What follows in the answer."""
        return self._answer[len(token_ids) - self._num_prompt :][:limit]


def told_drafter(prompts: Sequence[AuditPrompt], references: Sequence[Reference]) -> HostDrafter:
    """A drafter that knows what `references` say to `prompts`, and nothing of other requests."""
    answers: dict[_Key, list[int]] = {}
    for prompt, reference in zip(prompts, references, strict=True):
        places = sorted(place for place, component in reference.values if component == "token")
        tokens = [int(reference.values[place, "token"].text) for place in places]
        answers[_key(prompt.token_ids, prompt.seed, prompt.sample_index)] = tokens

    def begin(request: Request) -> _Told:
        known = answers.get(_key(request.prompt_token_ids, request.seed, request.sample_index), [])
        return _Told(len(request.prompt_token_ids), known)

    return begin


def _key(token_ids: list[int], seed: int, sample_index: int) -> _Key:
    return tuple(token_ids), seed, sample_index
