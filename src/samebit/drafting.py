"""Addresses of the rows that guess: one for each sequence that wants drafts, behind its committed tokens.

`DraftSteps` is to a drafter what the step's index is to the target: positions, ring rows and page slots of further tokens, one
a row at a time, which are guesses and will be overwritten. Everything is computed on the device. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from samebit.indexing import IndexBuffer, StepIndex
from samebit.inputs import Bucket, InputBuffer, StaticInputs
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import BlockIndex, SampleColumns
from samebit.state.pools import StatePools


class DraftSteps:
    """Owner of the addresses of P rows that guess, one token each.

    Valid between `begin` and the end of the step: `last_tokens` [P] int32, of which the target has seen nothing, and
    `lengths` [P] int64, the positions of these.
    """

    def __init__(self, inputs: StaticInputs, pools: StatePools, device: torch.device) -> None:
        self._inputs, self._tables = inputs, pools.tables
        num_rows = inputs.draft_slots.shape[0]
        bucket = Bucket(tokens=num_rows, rows=num_rows, samples=0, edits=0, entries=0, deltas=0, top=0, drafts=0)
        self._own = InputBuffer(bucket, device).view
        self._own.query_start.copy_(torch.arange(num_rows + 1))
        self._addresses = IndexBuffer(self._own, pools)
        self.num_rows = num_rows

    def begin(self, sampling: SampleColumns) -> None:
        """Take the words of each row's slot, as they are once the step's drafts have been accepted or not."""
        slots = self._inputs.draft_slots.long()
        self.lengths = torch.where(slots > 0, self._tables.length[slots], 0)
        self.last_tokens = torch.where(slots > 0, self._tables.next_token[slots], 0)
        self._own.row_tags.copy_(self._inputs.draft_tags)
        self._sampling = sampling

    def at(self, kernels: KernelSet, ahead: int, token_ids: Tensor) -> StepIndex:
        """The index of a step in which each row has one token, `token_ids` [P] int32, `ahead` places behind its last one.

        A row without a page for it becomes the inert slot's first, and its results mean nothing.
        """
        position = self.lengths + ahead
        has_page = position < self._inputs.draft_limits
        self._own.row_slots.copy_(torch.where(has_page, self._inputs.draft_slots, 0))
        self._own.row_start.copy_(torch.where(has_page, position, 0))
        self._own.token_ids.copy_(token_ids)
        return self._addresses.fill(kernels)

    def behind(self, group: int) -> BlockIndex:
        """What blocks see that stand behind each row's tokens: their keys in page group `group`. Such blocks need no pages."""
        return BlockIndex(self.lengths.int(), self._inputs.draft_slots, self._tables.page_table[group])

    def columns(self, ahead: int, count: int = 1) -> SampleColumns:
        """How the target is going to draw the tokens from `ahead` places behind each row's last one on (1: the first guess).

        Columns of every row's first such token, then of every row's next, `count` of each.
        """
        rows = self._inputs.draft_samples.long().expand(count, -1).flatten()
        taken = {field.name: getattr(self._sampling, field.name)[rows] for field in fields(SampleColumns)}
        position = self.lengths + torch.arange(ahead, ahead + count, device=rows.device)[:, None]
        taken |= {"position": position.flatten(), "target": torch.full_like(rows, -1, dtype=torch.int32)}
        return SampleColumns(**taken)
