"""One step on one rank: the function that eager runs call and graphs record. No host read, no data-dependent shape."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from samebit.indexing import IndexBuffer, StepIndex, acknowledge
from samebit.inputs import Bucket, StaticInputs
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import SampleColumns
from samebit.models.base import CausalLM
from samebit.state.pools import StatePools

LOGITS_SLICE = 512


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Results on the device.

    Per logits row `tokens`, `logprobs`, `ranks`, `finite` [L] and `top_ids`, `top_logprobs` [L, N]; `accepted`,
    `rows_intact` [B], `pages_intact` and `rows_written` [E] as in StepOutput.
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


def run_step(
    model: CausalLM,
    kernels: KernelSet,
    inputs: StaticInputs,
    addresses: IndexBuffer,
    pools: StatePools,
    bucket: Bucket,
) -> StepTensors:
    """Forward all tokens, draw or score every logits row, accept drafts, compare all tags."""
    index = addresses.fill(kernels)
    hidden = model.forward(index, pools.whole).final.index_select(0, index.sample_tokens)
    tokens, logprobs, ranks, finite, top_ids, top_logprobs = _sample(model, kernels, hidden, inputs, index, bucket)
    tables = pools.tables
    accepted = kernels.accept(tokens, index.drafts, tables.length, tables.next_token, pools.geometry.max_drafts)
    pages_intact, rows_written = acknowledge(inputs, index, pools)
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
    )


def _sample(
    model: CausalLM, kernels: KernelSet, hidden: Tensor, inputs: StaticInputs, index: StepIndex, bucket: Bucket
) -> tuple[Tensor, ...]:
    """Draw or score in slices, so that the logits of a long prompt never exist all at once."""
    if bucket.samples <= LOGITS_SLICE:
        return _sample_slice(model, kernels, hidden, inputs, index.sampling, bucket, 0)
    parts = []
    for first in range(0, bucket.samples, LOGITS_SLICE):
        part = slice(first, first + LOGITS_SLICE)
        sliced = {field.name: getattr(index.sampling, field.name)[part] for field in fields(SampleColumns)}
        columns = SampleColumns(**sliced)
        parts.append(_sample_slice(model, kernels, hidden[part], inputs, columns, bucket, first))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _sample_slice(
    model: CausalLM,
    kernels: KernelSet,
    hidden: Tensor,
    inputs: StaticInputs,
    columns: SampleColumns,
    bucket: Bucket,
    first: int,
) -> tuple[Tensor, ...]:
    logits = model.logits(hidden)
    if bucket.bans:
        columns = _draw_unbanned(kernels, logits, inputs, columns, first)
    drawn = kernels.sample(logits, columns)
    return *drawn, *kernels.top_logprobs(logits, bucket.top)


def _draw_unbanned(
    kernels: KernelSet, logits: Tensor, inputs: StaticInputs, columns: SampleColumns, first: int
) -> SampleColumns:
    """Draw with the bans applied, and make the drawn tokens the targets, so that they are scored on the raw logits."""
    rows = inputs.ban_samples.long() - first
    mine = (rows >= 0) & (rows < logits.shape[0])
    where = (torch.where(mine, rows, 0), torch.where(mine, inputs.ban_tokens.long(), 0))
    barred = logits.index_put(where, torch.where(mine, inputs.ban_logits, 0.0), accumulate=True)
    drawn = kernels.sample(barred, columns)[0]
    return replace(columns, target=torch.where(columns.target < 0, drawn, columns.target))
