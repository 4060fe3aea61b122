"""One step on one rank: the function that eager runs call and graphs record. No host read, no data-dependent shape."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebit.core.plan import BANNED_LOGIT
from samebit.drafting import NO_BLOCK, DraftSteps
from samebit.indexing import IndexBuffer, StepIndex, acknowledge
from samebit.inputs import Bucket, InputBuffer, StaticInputs
from samebit.kernels.branches import beside
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import SampleColumns
from samebit.models.base import CausalLM
from samebit.models.hidden import Hidden
from samebit.speculative.drafter import Drafter
from samebit.state.pools import PoolPart, StatePools

LOGITS_SLICE = 512


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafter and its share of the state."""

    drafter: Drafter
    state: PoolPart


class StepBuffers:
    """Owner of what the steps of one bucket read: the filled inputs, and the addresses that the device makes of them."""

    def __init__(
        self, bucket: Bucket, pools: StatePools, device: torch.device, speculation: Speculation | None
    ) -> None:
        self._buffer = InputBuffer(bucket, device)
        self.fill = self._buffer.fill
        self.inputs = self._buffer.view
        self.addresses = IndexBuffer(self.inputs, pools, bucket.longest)
        block = NO_BLOCK if speculation is None else speculation.drafter.block
        self.draft_steps = DraftSteps(self.inputs, pools, device, block)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Results on the device.

    Per logits row `tokens`, `logprobs`, `ranks`, `finite` [L] and `top_ids`, `top_logprobs` [L, N]; `accepted`,
    `rows_intact` [B], `pages_intact` and `rows_written` [E], `drafts` and `confidence` [P, D] as in StepOutput.
    """

    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor
    finite: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    accepted: Tensor
    rows_intact: Tensor
    pages_intact: Tensor
    rows_written: Tensor
    drafts: Tensor
    confidence: Tensor


def run_step(
    model: CausalLM,
    kernels: KernelSet,
    buffers: StepBuffers,
    pools: StatePools,
    bucket: Bucket,
    speculation: Speculation | None,
) -> StepTensors:
    """Forward all tokens, draw or score every logits row, accept drafts, guess further ones, compare all tags."""
    inputs = buffers.inputs
    index = buffers.addresses.fill(kernels)
    hidden = model.forward(index, pools.whole)
    with _taken_in(speculation, index, hidden):
        drawn = _sample(model, kernels, hidden.final, inputs, index, bucket)
        tokens, logprobs, ranks, finite, top_ids, top_logprobs = drawn
        tables = pools.tables
        accepted = kernels.accept(tokens, index.drafts, tables.length, tables.next_token, pools.geometry.max_drafts)
        if speculation is not None and buffers.draft_steps.num_rows:
            buffers.draft_steps.begin(kernels, index.sampling)
    drafts, confidence = _speculate(speculation, kernels, buffers, pools)
    pages_intact, rows_written = acknowledge(inputs, index, kernels, pools)
    return StepTensors(
        tokens=tokens,
        logprobs=logprobs,
        ranks=ranks,
        finite=finite,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        accepted=accepted,
        rows_intact=index.rows_intact,
        pages_intact=pages_intact,
        rows_written=rows_written,
        drafts=drafts,
        confidence=confidence,
    )


def _taken_in(speculation: Speculation | None, index: StepIndex, hidden: Hidden) -> AbstractContextManager[None]:
    """Beside what is drawn meanwhile the drafter, if there is one, takes in the step, whoever wants drafts."""
    if speculation is None:
        return nullcontext()
    drafter, state = speculation.drafter, speculation.state
    return beside(lambda: drafter.advance(index, hidden, state), hidden.final.device)


def _speculate(
    speculation: Speculation | None, kernels: KernelSet, buffers: StepBuffers, pools: StatePools
) -> tuple[Tensor, Tensor]:
    """The drafter guesses, and each slot keeps its guesses."""
    steps, slots = buffers.draft_steps, buffers.inputs.draft_slots
    if speculation is None or not steps.num_rows:
        nothing = slots.new_empty(slots.shape[0], 0)
        return nothing, nothing.float()
    found = speculation.drafter.propose(steps, speculation.state)
    guesses = kernels.keep_drafts(found.tokens, slots, pools.tables.drafts)
    return guesses, found.confidence


def _sample(
    model: CausalLM, kernels: KernelSet, hidden: Tensor, inputs: StaticInputs, index: StepIndex, bucket: Bucket
) -> tuple[Tensor, ...]:
    """Draw or score in slices, so that the logits of a long prompt never exist all at once."""
    if bucket.samples <= LOGITS_SLICE:
        return _sample_slice(model, kernels, hidden, index.sample_tokens, inputs, index.sampling, bucket, 0)
    parts = []
    for first in range(0, bucket.samples, LOGITS_SLICE):
        part = slice(first, first + LOGITS_SLICE)
        rows, columns = index.sample_tokens[part], index.sampling.part(part)
        parts.append(_sample_slice(model, kernels, hidden, rows, inputs, columns, bucket, first))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _sample_slice(
    model: CausalLM,
    kernels: KernelSet,
    hidden: Tensor,
    rows: Tensor,
    inputs: StaticInputs,
    columns: SampleColumns,
    bucket: Bucket,
    first: int,
) -> tuple[Tensor, ...]:
    logits = model.logits(hidden, rows)
    if bucket.edits or bucket.masks:
        columns = _draw_edited(kernels, logits, inputs, columns, first)
    drawn = kernels.sample(logits, columns)
    return *drawn, *kernels.top_logprobs(logits, bucket.top)


def _draw_edited(
    kernels: KernelSet, logits: Tensor, inputs: StaticInputs, columns: SampleColumns, first: int
) -> SampleColumns:
    """Draw with the edits applied, and make the drawn tokens the targets, so that they are scored on the raw logits."""
    num_rows = logits.shape[0]
    # The edits of other rows go to a row that nobody reads.
    edited = torch.cat([logits, logits[:1]])
    where = (_own_rows(inputs.edit_samples, first, num_rows), inputs.edit_tokens.long())
    found, penalty = edited[where], inputs.edit_penalties
    edited.index_put_(where, torch.where(found > 0, found / penalty, found * penalty) + inputs.edit_shifts)
    if inputs.mask_samples.shape[0]:
        rows = _own_rows(inputs.mask_samples, first, num_rows)
        allowed = _bits(inputs.mask_words.view(rows.shape[0], -1), logits.shape[1])
        edited.index_copy_(0, rows, torch.where(allowed, edited[rows], BANNED_LOGIT))
    drawn = kernels.draw(edited[:num_rows], columns)
    return replace(columns, target=torch.where(columns.target < 0, drawn, columns.target))


def _own_rows(samples: Tensor, first: int, num_rows: int) -> Tensor:
    """Places of logits rows in the slice that begins with row `first`; `num_rows`, one behind it, for those of other slices."""
    rows = samples.long() - first
    return torch.where((rows >= 0) & (rows < num_rows), rows, num_rows)


def _bits(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row of int32 `words` [M, W], lowest first: bool [M, count]."""
    places = torch.arange(count, device=words.device)
    return (words.index_select(1, places // 32) >> (places % 32).int()) & 1 == 1
