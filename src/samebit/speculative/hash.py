"""A drafter for the hash model: a second hash model beside it, with state of its own, that is wrong now and then.

It serves to prove the engine: one wrong word of the drafter's state changes what it guesses. It knows the target's recurrence, so
about two guesses in three are right; which ones are wrong is told by its own words. Knows no file.
"""

from __future__ import annotations

import msgspec
import torch

from samebit.drafting import NO_BLOCK, DraftSteps
from samebit.indexing import StepIndex
from samebit.kernels.sets import KernelSet
from samebit.models.hash import HashModel
from samebit.models.hidden import Hidden
from samebit.speculative.drafter import Proposals
from samebit.state.layout import ConvStream, StateLayout
from samebit.state.pools import PoolPart

MISS_SHIFT, MISS_EVERY = 7, 3


class HashDrafter:
    """A `Drafter`. A guess is what the target would draw, or the next token id where bits 7.. of its word divide by 3."""

    num_parameters = 0
    block = NO_BLOCK

    def __init__(self, target: HashModel, kernels: KernelSet, max_drafts: int, device: torch.device) -> None:
        self.max_drafts = max_drafts
        self._twin = HashModel(target.config, device)
        self._kernels = kernels

    def linear_shapes(self) -> set[tuple[int, int]]:
        """None: there are no linear maps."""
        return set()

    def state_layout(self) -> StateLayout:
        """As much again as the target keeps."""
        layout = self._twin.state_layout()
        streams = tuple(ConvStream(f"drafter.{stream.name}", stream.width) for stream in layout.streams)
        return msgspec.structs.replace(layout, streams=streams)

    def advance(self, index: StepIndex, hidden: Hidden, state: PoolPart) -> None:
        """Run the step's tokens, of which the target's words tell nothing."""
        del hidden
        self._twin.forward(index, state)

    def propose(self, steps: DraftSteps, state: PoolPart) -> Proposals:
        """One token after the other, each written as a row of its own."""
        token_ids, tokens = steps.last_tokens, []
        for ahead in range(self.max_drafts):
            words = self._twin.forward(steps.at(self._kernels, ahead, token_ids), state).final
            drawn = self._kernels.draw(self._twin.logits(words), steps.columns(ahead + 1))
            is_miss = ((words[:, 0] >> MISS_SHIFT) % MISS_EVERY) == 0
            token_ids = torch.where(is_miss, (drawn + 1) % self._twin.vocab_size, drawn)
            tokens.append(token_ids)
        return Proposals(torch.stack(tokens, dim=1), steps.no_opinion)
