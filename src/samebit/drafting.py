"""Addresses of the rows that guess: one for each sequence that wants drafts, behind its committed tokens.

`DraftSteps` is to a drafter what the step's index is to the target: positions, ring rows and page slots of further tokens, one
a row at a time or a block at once, which are guesses and will be overwritten. Everything is computed on the device. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebit.indexing import IndexBuffer, StepIndex
from samebit.inputs import Bucket, InputBuffer, StaticInputs
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import BlockIndex, DraftWords, SampleColumns
from samebit.state.pools import StatePools


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What is run at once for each row: its last token, then `filler` up to `num_tokens`; guesses come from row `first_guess` on."""

    num_tokens: int
    first_guess: int
    filler: int


NO_BLOCK = DraftBlock(0, 0, 0)


class DraftSteps:
    """Owner of the addresses of P rows that guess, and of D guesses and N tokens of a block for each.

    Valid between `begin` and the end of the step: `last_tokens` [P] int32, of which the target has seen nothing, and
    `lengths` [P] int32, the positions of these; `block_tokens` [P * N] int32 and `block_positions` [P * N] int64. Constant:
    `guess_rows` [D * P] int64, the block rows that guess, all rows' first ones first, and `no_opinion` [P, D] fp32, ones.
    """

    def __init__(self, inputs: StaticInputs, pools: StatePools, device: torch.device, block: DraftBlock) -> None:
        self._inputs, self._tables, self._filler = inputs, pools.tables, block.filler
        num_rows, max_drafts = inputs.draft_slots.shape[0], pools.geometry.max_drafts
        bucket = Bucket(tokens=num_rows, rows=num_rows, samples=0, edits=0, entries=0, deltas=0, top=0, drafts=0)
        self._own = replace(InputBuffer(bucket, device).view, row_tags=inputs.draft_tags)
        self._own.query_start.copy_(torch.arange(num_rows + 1))
        self._addresses = IndexBuffer(self._own, pools, bucket.longest)
        self._words = _words(num_rows, max_drafts, block.num_tokens, device)
        self._columns = _columns(self._words)
        self.num_rows = num_rows
        self.lengths, self.last_tokens = self._words.lengths, self._words.last_tokens
        self.block_tokens, self.block_positions = self._words.token_ids.flatten(), self._words.positions.flatten()
        first = torch.arange(num_rows, device=device) * block.num_tokens + block.first_guess
        self.guess_rows = (first + torch.arange(max_drafts, device=device)[:, None]).flatten()
        self.no_opinion = torch.ones(num_rows, max_drafts, device=device)

    def begin(self, kernels: KernelSet, sampling: SampleColumns) -> None:
        """Take the words of each row's slot, as they are once the step's drafts have been accepted or not."""
        slots, samples = self._inputs.draft_slots, self._inputs.draft_samples
        length, next_token = self._tables.length, self._tables.next_token
        kernels.draft_words(slots, samples, length, next_token, sampling, self._words, self._filler)

    def at(self, kernels: KernelSet, ahead: int, token_ids: Tensor) -> StepIndex:
        """The index of a step in which each row has one token, `token_ids` [P] int32, `ahead` places behind its last one.

        A row without a page for it becomes the inert slot's first, and its results mean nothing.
        """
        position = self.lengths + ahead
        has_page = position < self._inputs.draft_limits
        torch.mul(self._inputs.draft_slots, has_page, out=self._own.row_slots)
        torch.mul(position, has_page, out=self._own.row_start)
        self._own.token_ids.copy_(token_ids)
        return self._addresses.fill(kernels)

    def behind(self, group: int) -> BlockIndex:
        """What blocks see that stand behind each row's tokens: their keys in page group `group`. Such blocks need no pages."""
        return BlockIndex(self.lengths, self._inputs.draft_slots, self._tables.page_table[group])

    def columns(self, ahead: int, count: int = 1) -> SampleColumns:
        """How the target is going to draw the tokens from `ahead` places behind each row's last one on (1: the first guess).

        Columns of every row's first such token, then of every row's next, `count` of each.
        """
        return self._columns.part(slice((ahead - 1) * self.num_rows, (ahead - 1 + count) * self.num_rows))


def _words(num_rows: int, max_drafts: int, num_tokens: int, device: torch.device) -> DraftWords:
    """Room for what rows guess by."""
    narrow, wide, real = torch.int32, torch.int64, torch.float32
    columns = (real, narrow, real, real, wide, narrow, wide)
    return DraftWords(
        *(torch.zeros(num_rows, dtype=narrow, device=device) for _ in range(2)),
        *(torch.zeros(max_drafts, num_rows, dtype=dtype, device=device) for dtype in columns),
        *(torch.zeros(num_rows, num_tokens, dtype=dtype, device=device) for dtype in (narrow, wide)),
    )


def _columns(words: DraftWords) -> SampleColumns:
    """The words' columns of sampling, in which nobody says what to draw."""
    found = {name: getattr(words, name).flatten() for name in words._fields if name in SampleColumns.__slots__}
    return SampleColumns(**found, target=torch.full_like(found["top_k"], -1))
