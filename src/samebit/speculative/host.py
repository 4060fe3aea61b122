"""Drafters that live on the host: plain functions of a sequence's tokens, with no weights and no state on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from samebit.core.request import Request


class Proposer(Protocol):
    """Guesses for one sequence. May keep what it has learnt of it between calls; a preemption loses nothing."""

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """At most `limit` token ids of the vocabulary that may follow `token_ids`, which begin with those of the call before."""
        ...


HostDrafter = Callable[[Request], Proposer]
"""Makes the proposer of a new request."""
