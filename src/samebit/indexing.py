"""Addresses of one step, computed on the device from StaticInputs and the slot tables; no value is read by the host.

`build_index` turns lengths into positions, ring rows, page slots and tags, `acknowledge` compares tags after the step.
Both have static shapes and no branch on what kind of work a row is. They know no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.core.plan import POSITION_TAG_STEP
from samebit.inputs import StaticInputs
from samebit.kernels.values import AttnIndex, ConvIndex, KvIndex, SampleColumns
from samebit.state.layout import SINK_ROW, ZERO_ROW, StateGeometry
from samebit.state.pools import StatePools


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What a model's forward gets: T tokens of B rows, and where everything lies.

    `token_ids` [T] int32, `positions` [T] int64, `num_tokens` [1] int32 (tokens beyond it are padding); `conv` for every
    stream; `kv[g]` and `attn[g]` for page group g; `sample_tokens` [L] int64 is the token whose hidden state each logits
    row uses; `sampling` its columns; `rows_intact` [B] bool.
    """

    token_ids: Tensor
    positions: Tensor
    num_tokens: Tensor
    conv: ConvIndex
    kv: tuple[KvIndex, ...]
    attn: tuple[AttnIndex, ...]
    sample_tokens: Tensor
    sample_slots: Tensor
    sampling: SampleColumns
    rows_intact: Tensor


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Per token: batch row, slot, position, tag, and whether it is live (not padding)."""

    row: Tensor
    slot: Tensor
    position: Tensor
    tag: Tensor
    live: Tensor


def build_index(inputs: StaticInputs, pools: StatePools) -> StepIndex:
    """Compute every address of the step, then record in the slot tables what the step is going to write."""
    geometry, tables = pools.geometry, pools.tables
    _apply_page_deltas(inputs, pools)
    slot = inputs.row_slots.long()
    continues = inputs.row_continues != 0
    start = torch.where(continues, tables.length[slot], inputs.row_start)
    tokens = _tokens(inputs, slot, start)
    token_ids = torch.where(continues[tokens.row] & tokens.live, tables.next_token[tokens.slot], inputs.token_ids)
    conv = _conv_index(inputs, pools, tokens, slot, start)
    kv = tuple(_kv_index(g, inputs, pools, tokens) for g in range(len(geometry.layout.groups)))
    attn = tuple(
        AttnIndex(
            query_start=inputs.query_start,
            row_start=start.int(),
            row_slots=inputs.row_slots,
            page_table=tables.page_table[g],
        )
        for g in range(len(geometry.layout.groups))
    )
    intact = (pools.row_tags[:, conv.read_rows.long()] == conv.read_tags).all(dim=2).all(dim=0)
    _record_writes(inputs, pools, tokens, conv, slot, start)
    sample_row = inputs.sample_rows.long()
    sample_tokens = inputs.query_start[sample_row].long() + inputs.sample_offsets
    drawn = inputs.sample_targets < 0
    return StepIndex(
        token_ids=token_ids,
        positions=tokens.position,
        num_tokens=inputs.query_start[-1:],
        conv=conv,
        kv=kv,
        attn=attn,
        sample_tokens=sample_tokens,
        sample_slots=torch.where(drawn, slot[sample_row], 0),
        sampling=SampleColumns(
            temperature=inputs.sample_temperature,
            top_k=inputs.sample_top_k,
            top_p=inputs.sample_top_p,
            min_p=inputs.sample_min_p,
            seed=inputs.sample_seeds,
            sample_index=inputs.sample_indices,
            position=start[sample_row] + inputs.sample_offsets + 1,
            target=inputs.sample_targets,
        ),
        rows_intact=intact,
    )


def acknowledge(inputs: StaticInputs, index: StepIndex, pools: StatePools) -> tuple[Tensor, Tensor]:
    """After the step: (`pages_intact` [E], `rows_written` [E]), both bool; see StepOutput."""
    geometry, tables = pools.geometry, pools.tables
    slot = inputs.row_slots.long()[inputs.entry_rows.long()]
    pages_intact = torch.ones_like(slot, dtype=torch.bool)
    page = torch.arange(geometry.pages_per_sequence, device=slot.device)
    last = inputs.entry_boundaries // geometry.page_size
    for g, group in enumerate(geometry.layout.groups):
        low = torch.zeros_like(last)
        if group.window is not None:
            low = (inputs.entry_boundaries - group.window + 1).clamp(min=0) // geometry.page_size
        outside = (page < low[:, None]) | (page >= last[:, None])
        actual = pools.page_tags[g][:, tables.page_table[g][slot].long()]
        same = (actual == tables.page_stamps[g][slot]).all(dim=0)
        pages_intact &= (same | outside).all(dim=1)
    written = pools.row_tags[:, index.conv.entry_dest.long()] == inputs.entry_tags[:, None]
    return pages_intact, written.all(dim=2).all(dim=0)


def _apply_page_deltas(inputs: StaticInputs, pools: StatePools) -> None:
    slots, indices = inputs.delta_slots.long(), inputs.delta_indices.long()
    for g, (table, stamps) in enumerate(zip(pools.tables.page_table, pools.tables.page_stamps, strict=True)):
        mine = inputs.delta_groups == g
        where = (torch.where(mine, slots, 0), torch.where(mine, indices, 0))
        table[where] = torch.where(mine, inputs.delta_pages, 0)
        stamps[where] = torch.where(mine, inputs.delta_stamps, 0)


def _tokens(inputs: StaticInputs, slot: Tensor, start: Tensor) -> _Tokens:
    number = torch.arange(inputs.token_ids.shape[0], device=slot.device)
    row = torch.searchsorted(inputs.query_start[1:].long(), number, right=True)
    live = row < slot.shape[0]
    row = row.clamp(max=slot.shape[0] - 1)
    position = torch.where(live, start[row] + number - inputs.query_start[row], 0)
    tag = inputs.row_tags[row] + position * POSITION_TAG_STEP
    return _Tokens(row=row, slot=torch.where(live, slot[row], 0), position=position, tag=tag, live=live)


def _ring_rows(geometry: StateGeometry, slot: Tensor, position: Tensor) -> Tensor:
    return geometry.ring_base(0) + slot * geometry.ring_length + position % geometry.ring_length


def _snapshot_rows(geometry: StateGeometry, snapshot: Tensor) -> Tensor:
    steps = torch.arange(geometry.layout.history, device=snapshot.device)
    return geometry.snapshot_base(0) + snapshot.long()[:, None] * geometry.layout.history + steps


def _history_rows(
    inputs: StaticInputs, pools: StatePools, row: Tensor, slot: Tensor, start: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Pool rows (and the tags they must carry) of `position` [N, K-1] < start, for batch rows `row` [N]."""
    geometry = pools.geometry
    resume = inputs.row_resume.long()[row][:, None]
    oldest = geometry.snapshot_base(0) + resume * geometry.layout.history
    from_snapshot = oldest + position - (start[row][:, None] - geometry.layout.history)
    slots = slot[row][:, None]
    ring = _ring_rows(geometry, slots, position)
    ring_tag = pools.tables.ring_tags[slots, position % geometry.ring_length]
    before = position < 0
    rows = torch.where(resume > 0, from_snapshot, torch.where(before, ZERO_ROW, ring))
    tags = torch.where(resume > 0, inputs.row_resume_tag[row][:, None], torch.where(before, 0, ring_tag))
    return rows, tags


def _conv_index(inputs: StaticInputs, pools: StatePools, tokens: _Tokens, slot: Tensor, start: Tensor) -> ConvIndex:
    geometry = pools.geometry
    history = torch.arange(-geometry.layout.history, 0, device=slot.device)
    all_rows = torch.arange(slot.shape[0], device=slot.device)
    position = start[:, None] + history
    read_rows, read_tags = _history_rows(inputs, pools, all_rows, slot, start, position)
    stores = (inputs.row_resume[:, None] > 0) & (position >= 0)
    store_rows = torch.where(stores, _ring_rows(geometry, slot[:, None], position), SINK_ROW)

    query_end = inputs.query_start[1:][tokens.row]
    number = torch.arange(tokens.row.shape[0], device=slot.device)
    kept = tokens.live & (number >= query_end - geometry.ring_length)
    write_rows = torch.where(kept, _ring_rows(geometry, tokens.slot, tokens.position), SINK_ROW)

    entry_row = inputs.entry_rows.long()
    wanted = inputs.entry_boundaries[:, None] + history
    pool_rows, pool_tags = _history_rows(inputs, pools, entry_row, slot, start, wanted)
    in_step = wanted >= start[entry_row][:, None]
    step_token = inputs.query_start[entry_row][:, None] + wanted - start[entry_row][:, None]
    kept_entry = inputs.entry_snapshots[:, None] > 0
    dest = torch.where(kept_entry, _snapshot_rows(geometry, inputs.entry_snapshots), SINK_ROW)
    return ConvIndex(
        query_start=inputs.query_start,
        read_rows=read_rows.int(),
        read_tags=read_tags,
        store_rows=store_rows.int(),
        store_tags=inputs.row_tags[:, None] + position * POSITION_TAG_STEP,
        write_rows=write_rows.int(),
        write_tags=tokens.tag,
        entry_row=inputs.entry_rows,
        entry_sources=torch.where(in_step, step_token, -(pool_rows + 1)).int(),
        entry_source_tags=torch.where(in_step, 0, pool_tags),
        entry_dest=dest.int(),
        entry_tag=inputs.entry_tags,
    )


def _kv_index(group: int, inputs: StaticInputs, pools: StatePools, tokens: _Tokens) -> KvIndex:
    page_size = pools.geometry.page_size
    page = pools.tables.page_table[group][tokens.slot, tokens.position // page_size]
    offset = tokens.position % page_size
    completes = tokens.live & (offset == page_size - 1)
    return KvIndex(
        query_start=inputs.query_start,
        write_slots=torch.where(tokens.live, page * page_size + offset, 0).int(),
        stamp_pages=torch.where(completes, page, 0),
        stamp_tags=tokens.tag,
    )


def _record_writes(
    inputs: StaticInputs, pools: StatePools, tokens: _Tokens, conv: ConvIndex, slot: Tensor, start: Tensor
) -> None:
    """Lengths, ring tags and page stamps as they must be once the step's kernels have run."""
    geometry, tables = pools.geometry, pools.tables
    ring, page_size = geometry.ring_length, geometry.page_size
    history = torch.arange(-geometry.layout.history, 0, device=slot.device)
    position = start[:, None] + history
    stored = conv.store_rows != SINK_ROW
    tables.ring_tags[torch.where(stored, slot[:, None], 0), position % ring] = conv.store_tags
    written = conv.write_rows != SINK_ROW
    tables.ring_tags[torch.where(written, tokens.slot, 0), tokens.position % ring] = tokens.tag
    completes = tokens.live & (tokens.position % page_size == page_size - 1)
    where = (torch.where(completes, tokens.slot, 0), torch.where(completes, tokens.position // page_size, 0))
    for stamps in tables.page_stamps:
        stamps[where] = tokens.tag
    tables.length[slot] = start + inputs.query_start.diff()
