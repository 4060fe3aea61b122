"""Addresses of one step, computed on the device from StaticInputs and the slot tables; no value is read by the host.

An `IndexBuffer` turns lengths into positions, ring rows, page slots and tags, `acknowledge` compares tags after the step.
Both have static shapes and no branch on what kind of work a row is. They know no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.inputs import StaticInputs
from samebit.kernels.sets import KernelSet
from samebit.kernels.torch_index import index_results
from samebit.kernels.values import (
    INDEX_RESULTS,
    AttnIndex,
    ConvIndex,
    DraftIndex,
    EntryIndex,
    IndexFields,
    IndexSizes,
    KvIndex,
    PageTags,
    SampleColumns,
)
from samebit.state.layout import StateGeometry
from samebit.state.pools import StatePools


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What a model's forward gets: T tokens of B rows, and where everything lies.

    `token_ids` [T] int32, `positions` [T] int64, `num_tokens` [1] int32 (tokens beyond it are padding); `conv` for every
    stream; `kv[g]` and `attn[g]` for page group g; `sample_tokens` [L] int64 is the token whose hidden state each logits
    row uses, `sampling` its columns; `drafts` says which tokens are guesses; `entries` which checkpoints are compared; `rows_intact` [B] bool.
    """

    token_ids: Tensor
    positions: Tensor
    num_tokens: Tensor
    conv: ConvIndex
    kv: tuple[KvIndex, ...]
    attn: tuple[AttnIndex, ...]
    sample_tokens: Tensor
    sampling: SampleColumns
    drafts: DraftIndex
    entries: EntryIndex
    rows_intact: Tensor


class IndexBuffer:
    """Owner of the addresses of all steps of one bucket, at fixed places like the inputs they are computed from.

    No batch row has more than ``longest`` tokens.
    """

    def __init__(self, inputs: StaticInputs, pools: StatePools, longest: int) -> None:
        tables = pools.tables
        self._fields = [getattr(inputs, name) for name in IndexFields._fields]
        self._tables = [
            tables.length,
            tables.next_token,
            tables.drafts,
            tables.ring_tags,
            pools.row_tags,
            *tables.page_table,
            *tables.page_stamps,
        ]
        self._sizes = _sizes(pools.geometry)
        self._results = index_results(self._fields, self._tables, self._sizes)
        self._view = _step_index(inputs, self._results, tables.page_table, longest)

    def fill(self, kernels: KernelSet) -> StepIndex:
        """Compute every address of the step, and record in the slot tables what the step is going to write."""
        kernels.step_index(self._fields, self._tables, self._results, self._sizes)
        return self._view


def _step_index(inputs: StaticInputs, results: list[Tensor], page_table: tuple[Tensor, ...], longest: int) -> StepIndex:
    """The results under their names, beside the inputs that need no computation."""
    found = dict(zip(INDEX_RESULTS, results, strict=False))
    per_group = results[len(INDEX_RESULTS) :]
    groups = range(len(page_table))
    query_start, tags = inputs.query_start, found["token_tags"]
    return StepIndex(
        token_ids=found["token_ids"],
        positions=found["positions"],
        num_tokens=query_start[-1:],
        conv=ConvIndex(
            query_start=query_start,
            read_rows=found["read_rows"],
            read_tags=found["read_tags"],
            store_rows=found["store_rows"],
            store_tags=found["store_tags"],
            write_rows=found["write_rows"],
            write_tags=tags,
            entry_sources=found["entry_sources"],
            entry_source_tags=found["entry_source_tags"],
            entry_dest=found["entry_dest"],
            entry_tag=inputs.entry_tags,
        ),
        kv=tuple(KvIndex(per_group[g], per_group[len(groups) + g], tags) for g in groups),
        attn=tuple(
            AttnIndex(query_start, found["row_start"], inputs.row_slots, page_table[g], longest) for g in groups
        ),
        sample_tokens=found["sample_tokens"],
        sampling=SampleColumns(
            temperature=inputs.sample_temperature,
            top_k=inputs.sample_top_k,
            top_p=inputs.sample_top_p,
            min_p=inputs.sample_min_p,
            seed=inputs.sample_seeds,
            sample_index=inputs.sample_indices,
            position=found["sample_positions"],
            target=inputs.sample_targets,
        ),
        drafts=DraftIndex(
            token_ids=found["token_ids"],
            query_start=query_start,
            row_slots=inputs.row_slots,
            row_start=found["row_start"],
            row_drafts=inputs.row_drafts,
            row_first_draw=inputs.row_first_draw,
        ),
        entries=EntryIndex(
            rows=inputs.entry_rows,
            boundaries=inputs.entry_boundaries,
            tags=inputs.entry_tags,
            dest=found["entry_dest"],
            row_slots=inputs.row_slots,
        ),
        rows_intact=found["rows_intact"],
    )


def acknowledge(inputs: StaticInputs, index: StepIndex, kernels: KernelSet, pools: StatePools) -> tuple[Tensor, Tensor]:
    """After the step: (`pages_intact` [E], `rows_written` [E]), both bool; see StepOutput."""
    if not inputs.entry_rows.shape[0]:
        nothing = inputs.entry_rows.new_empty(0, dtype=torch.bool)
        return nothing, nothing
    tables, geometry = pools.tables, pools.geometry
    windows = [group.window or 0 for group in geometry.layout.groups]
    found, table, stamps = list(pools.page_tags), list(tables.page_table), list(tables.page_stamps)
    pages = PageTags(found, table, stamps, windows, geometry.page_size)
    return kernels.acknowledge(index.entries, pools.row_tags, pages)


def _sizes(geometry: StateGeometry) -> IndexSizes:
    return IndexSizes(
        history=geometry.layout.history,
        ring_length=geometry.ring_length,
        ring_origin=geometry.ring_base(0),
        snapshot_origin=geometry.snapshot_base(0),
        page_size=geometry.page_size,
        max_drafts=geometry.max_drafts,
    )
