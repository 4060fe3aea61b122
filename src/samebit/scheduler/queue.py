"""Who is next among the requests that wait: by priority, and by age. Knows requests and steps; no clock and no memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import itemgetter

from samebit.core.errors import InvalidRequestError, PromptTooLongError
from samebit.core.request import MAX_PRIORITY, Request
from samebit.scheduler.sequence import Sequence

_Key = tuple[int, int, int]
_LAST = 2


class WaitingQueue:
    """Owner of the order of waiting sequences. Those that were preempted come first, the last preempted before all.

    The others are ordered by the step of their arrival less `aging_steps` for each level of their priority. So a request is overtaken only by what arrives within `aging_steps` steps for each level between them: whatever
    arrives later comes after it, and nobody starves. Shadows come after all requests. The order of two requests never changes.
    """

    def __init__(self, aging_steps: int) -> None:
        self._aging_steps = aging_steps
        self._entries: list[tuple[_Key, Sequence]] = []
        self._keys: dict[str, _Key] = {}
        self._num_added = self._num_shadows = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_requests(self) -> int:
        """How many wait that are no shadows."""
        return len(self._entries) - self._num_shadows

    def __iter__(self) -> Iterator[Sequence]:
        return map(itemgetter(1), self._entries)

    def add(self, sequence: Sequence, step: int) -> None:
        """A request has arrived while `step` was the last one planned."""
        self._insert(sequence, (1, step - sequence.request.priority * self._aging_steps, self._num_added))

    def add_first(self, sequence: Sequence) -> None:
        """A sequence that was running waits again, before all others."""
        self._insert(sequence, (0, -self._num_added, 0))

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        self._entries.remove((self._keys.pop(sequence.request.request_id), sequence))
        self._num_shadows -= sequence.request.is_shadow

    def _insert(self, sequence: Sequence, key: _Key) -> None:
        self._num_added += 1
        self._num_shadows += sequence.request.is_shadow
        key = (_LAST, *key[1:]) if sequence.request.is_shadow else key
        self._keys[sequence.request.request_id] = key
        insort(self._entries, (key, sequence), key=lambda entry: entry[0])


def check_fits(request: Request, max_length: int) -> None:
    """Raise InvalidRequestError (or PromptTooLongError) for a request that can never run."""
    num_prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens or 1
    if not num_prompt:
        raise InvalidRequestError("the prompt has no tokens; at least 1 is needed", param="prompt")
    if num_prompt + wanted > max_length:
        raise PromptTooLongError(
            f"prompt of {num_prompt} tokens plus {wanted} to generate: at most {max_length} fit",
            param="prompt" if num_prompt >= max_length else "max_tokens",
        )
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority={request.priority}: must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", param="priority"
        )
