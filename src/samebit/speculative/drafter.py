"""Drafters with state on the device: what every one of them offers the runner.

A drafter is a small model beside the target. Its layers and streams lie in the same pools, under the same page tables and
rings, so that whatever keeps, publishes and restores the target's state does the same for the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from samebit.drafting import DraftBlock, DraftSteps
from samebit.indexing import StepIndex
from samebit.models.hidden import Hidden
from samebit.state.layout import StateLayout
from samebit.state.pools import PoolPart


@dataclass(frozen=True, slots=True)
class Proposals:
    """`tokens` [P, D] int32: guesses of the tokens behind each row's last one. `confidence` [P, D] fp32: the drafter's
    estimate that the target draws that token too, given that it drew those before it; 1 where it has no opinion
    (`DraftSteps.no_opinion`). Both may be views.
    """

    tokens: Tensor
    confidence: Tensor


class Drafter(Protocol):
    """Guesses `max_drafts` tokens. `block`: what it runs at once for each row, if it does. `num_parameters` counts the elements of all
    weights of its own.
    """

    max_drafts: int
    block: DraftBlock
    num_parameters: int

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(N, K) of every linear map, for certification of the kernels."""
        ...

    def state_layout(self) -> StateLayout:
        """What the drafter keeps for each request beside the target's state."""
        ...

    def advance(self, index: StepIndex, hidden: Hidden, state: PoolPart) -> None:
        """Take in all tokens of a step, like the target: in prefill, decode and verification, whoever speculates.

        It runs beside the draws (`kernels.branches`): it reads nothing that comes of these, and writes `state` alone.
        """
        ...

    def propose(self, steps: DraftSteps, state: PoolPart) -> Proposals:
        """Guess, for each row of `steps`, what follows its last token."""
        ...
