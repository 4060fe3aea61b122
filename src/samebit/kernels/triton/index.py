"""Addresses of a step on a device: the twin is kernels/torch_index.py. Integers only, each written once.

Three launches that follow one another: page deltas, which everything after them must see; all addresses, which read the slot
tables; and what the step is going to write in the rings, which changes those. Knows the order of its arguments (values.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels import torch_index, values
from samebit.kernels.triton.launch import launch
from samebit.kernels.values import INDEX_RESULTS, INDEX_TABLES, IndexFields, IndexSizes

MAX_GROUPS = 4
TAG_STEP = tl.constexpr(torch_index.TAG_STEP)
SINK_ROW = tl.constexpr(values.SINK_ROW)
# Elements of a program, by what it works on; batch rows are searched in blocks of ROW_BLOCK.
DELTA_BLOCK, TOKEN_BLOCK, ENTRY_BLOCK, SAMPLE_BLOCK, RECORD_BLOCK, ACCEPT_BLOCK = 256, 32, 32, 128, 64, 32
ROW_BLOCK = 128


def jit_once(function: Callable[..., Any]) -> Any:  # Triton has no types
    """A kernel that is compiled once for inputs of all sizes and places: each bucket has a buffer of its own."""
    names = [name for name, x in inspect.signature(function).parameters.items() if x.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=names)


@triton.jit
def batch_rows(tokens, query_start, num_rows, BLOCK: tl.constexpr):
    """The batch row of each of ``tokens`` [N], int32: as many rows end at or before it. ``num_rows`` for padding."""
    found = tl.zeros_like(tokens)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        end = tl.load(query_start + 1 + row, mask=row < num_rows, other=2147483647)
        found += tl.sum((end[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    return found


@jit_once
def apply_deltas_kernel(
    groups, slots, indices, pages, stamps,
    table_0, table_1, table_2, table_3, stamps_0, stamps_1, stamps_2, stamps_3,
    num_deltas, num_pages,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Put pages and their stamps into the slots' tables; a delta that is padding writes zeros to slot 0."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = d < num_deltas
    group = tl.load(groups + d, mask=live, other=-1)
    at = tl.load(slots + d, mask=live, other=0) * num_pages + tl.load(indices + d, mask=live, other=0)
    page, stamp = tl.load(pages + d, mask=live, other=0), tl.load(stamps + d, mask=live, other=0)
    tl.store(table_0 + at, page, mask=group == 0)
    tl.store(table_1 + at, page, mask=group == 1)
    tl.store(table_2 + at, page, mask=group == 2)
    tl.store(table_3 + at, page, mask=group == 3)
    tl.store(stamps_0 + at, stamp, mask=group == 0)
    tl.store(stamps_1 + at, stamp, mask=group == 1)
    tl.store(stamps_2 + at, stamp, mask=group == 2)
    tl.store(stamps_3 + at, stamp, mask=group == 3)


@triton.jit
def first_positions(row, is_row, row_slots, row_continues, row_start, length):
    """Of batch rows: the slot, whether the row continues from the slot's words, and its first position, int64."""
    slot = tl.load(row_slots + row, mask=is_row, other=0)
    continues = tl.load(row_continues + row, mask=is_row, other=0) != 0
    given = tl.load(row_start + row, mask=is_row, other=0)
    return slot, continues, tl.where(continues, tl.load(length + slot, mask=is_row, other=0), given)


@triton.jit
def history_rows(
    position, wanted, slot, start, resume, resume_tag, length, ring_tags, ring_origin, snapshot_origin,
    HISTORY: tl.constexpr, RING: tl.constexpr, MAX_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Pool rows that hold ``position`` < start before the step, and the tags they must carry, both int64."""
    # Division differs from Python's below zero, where the row is the zero row.
    before = position < 0
    place = slot * RING + tl.where(before, 0, position) % RING
    # A position that the ring has left behind shares its row with a later one, whose tag must not pass for its own.
    is_gone = position < tl.load(length + slot) + MAX_DRAFTS - RING
    tag = tl.load(ring_tags + place, mask=wanted, other=0) ^ is_gone.to(tl.int64)
    from_snapshot = snapshot_origin + resume * HISTORY + position - (start - HISTORY)
    row = tl.where(resume > 0, from_snapshot, tl.where(before, 0, ring_origin + place))
    return row, tl.where(resume > 0, resume_tag, tl.where(before, 0, tag))


@triton.jit
def page_addresses(
    token, is_token, live, slot, position, tag, table, stamps, write_slots, completed, num_pages, SIZE: tl.constexpr
):
    """Where a group keeps tokens, and the pages that they complete, which are to carry their tags."""
    at, offset = slot * num_pages + position // SIZE, position % SIZE
    page = tl.load(table + at, mask=live, other=0)
    completes = live & (offset == SIZE - 1)
    tl.store(write_slots + token, tl.where(live, page * SIZE + offset, 0).to(tl.int32), mask=is_token)
    tl.store(completed + token, tl.where(completes, page, 0), mask=is_token)
    # Nothing in this launch reads stamps, so they can be recorded here.
    tl.store(stamps + at, tag, mask=completes)


@triton.jit
def index_row(
    row, h,
    query_start, row_slots, row_continues, row_resume, row_start, row_tags, row_resume_tag, length, ring_tags, pool_tags,
    starts, read_rows, read_tags, store_rows, store_tags, rows_intact,
    pool_rows, ring_origin, snapshot_origin,
    STREAMS: tl.constexpr, HISTORY: tl.constexpr, RING: tl.constexpr, MAX_DRAFTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Where a batch row finds and keeps the inputs before it, and whether they carry the right tags in every stream."""
    slot, _, start = first_positions(row, True, row_slots, row_continues, row_start, length)
    tl.store(starts + row, start.to(tl.int32))
    resume = tl.load(row_resume + row)
    position, wanted, at = start - HISTORY + h, h < HISTORY, row * HISTORY + h
    found, tag = history_rows(
        position, wanted, slot, start, resume, tl.load(row_resume_tag + row), length, ring_tags, ring_origin,
        snapshot_origin, HISTORY, RING, MAX_DRAFTS,
    )  # fmt: skip
    ring_row = ring_origin + slot * RING + tl.where(position < 0, 0, position) % RING
    tl.store(read_rows + at, found.to(tl.int32), mask=wanted)
    tl.store(read_tags + at, tag, mask=wanted)
    stored = tl.where((resume > 0) & (position >= 0), ring_row, SINK_ROW)
    tl.store(store_rows + at, stored.to(tl.int32), mask=wanted)
    tl.store(store_tags + at, tl.load(row_tags + row) + position * TAG_STEP, mask=wanted)
    stream = tl.arange(0, BLOCK_S)[:, None]
    compared = (stream < STREAMS) & wanted[None, :]
    actual = tl.load(pool_tags + stream.to(tl.int64) * pool_rows + found[None, :], mask=compared, other=0)
    differs = (compared & (actual != tag[None, :])).to(tl.int32)
    tl.store(rows_intact + row, (tl.sum(tl.sum(differs, axis=1), axis=0) == 0).to(tl.uint8))


@triton.jit
def index_entries(
    entry, is_entry, h,
    query_start, row_slots, row_continues, row_resume, row_start, row_resume_tag, length, ring_tags,
    entry_rows, entry_snapshots, entry_boundaries, entry_sources, entry_source_tags, entry_dest,
    ring_origin, snapshot_origin,
    HISTORY: tl.constexpr, RING: tl.constexpr, MAX_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Sources and destinations of checkpoint entries."""
    row = tl.load(entry_rows + entry, mask=is_entry, other=0)
    slot, _, start = first_positions(row, is_entry, row_slots, row_continues, row_start, length)
    resume = tl.load(row_resume + row, mask=is_entry, other=0)[:, None]
    resume_tag = tl.load(row_resume_tag + row, mask=is_entry, other=0)[:, None]
    wanted, at = is_entry[:, None] & (h < HISTORY)[None, :], entry[:, None] * HISTORY + h[None, :]
    position = tl.load(entry_boundaries + entry, mask=is_entry, other=0)[:, None] - HISTORY + h[None, :]
    found, tag = history_rows(
        position, wanted, slot[:, None], start[:, None], resume, resume_tag, length, ring_tags, ring_origin,
        snapshot_origin, HISTORY, RING, MAX_DRAFTS,
    )  # fmt: skip
    ahead = position - start[:, None]
    source = tl.where(ahead >= 0, tl.load(query_start + row, mask=is_entry, other=0)[:, None] + ahead, -(found + 1))
    snapshot = tl.load(entry_snapshots + entry, mask=is_entry, other=0)[:, None]
    dest = tl.where(snapshot > 0, snapshot_origin + snapshot * HISTORY + h[None, :], SINK_ROW)
    tl.store(entry_sources + at, source.to(tl.int32), mask=wanted)
    tl.store(entry_source_tags + at, tl.where(ahead >= 0, 0, tag), mask=wanted)
    tl.store(entry_dest + at, dest.to(tl.int32), mask=wanted)


@triton.jit
def index_samples(
    sample, is_sample,
    query_start, row_slots, row_continues, row_start, length, sample_rows, sample_offsets, sample_tokens, sample_positions,
):  # fmt: skip
    """The token whose hidden state each logits row uses, and the position of what is drawn."""
    row = tl.load(sample_rows + sample, mask=is_sample, other=0)
    offset = tl.load(sample_offsets + sample, mask=is_sample, other=0)
    _, _, start = first_positions(row, is_sample, row_slots, row_continues, row_start, length)
    first = tl.load(query_start + row, mask=is_sample, other=0)
    tl.store(sample_tokens + sample, (first + offset).to(tl.int64), mask=is_sample)
    tl.store(sample_positions + sample, start + offset + 1, mask=is_sample)


@triton.jit
def index_tokens(
    token, is_token,
    query_start, token_ids, row_slots, row_continues, row_start, row_tags, length, next_token, drafts,
    ids, positions, write_rows, token_tags,
    num_rows, ring_origin,
    RING: tl.constexpr, MAX_DRAFTS: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """What tokens are and where their inputs are kept. Their slots, positions and tags, and which are no padding."""
    row = batch_rows(token, query_start, num_rows, ROW_BLOCK)
    live = is_token & (row < num_rows)
    slot, continues, start = first_positions(row, live, row_slots, row_continues, row_start, length)
    ahead = token - tl.load(query_start + row, mask=live, other=0)
    position = tl.where(live, start + ahead, 0)
    tag = tl.where(live, tl.load(row_tags + row, mask=live, other=0) + position * TAG_STEP, 0)
    # A row that continues takes the last drawn token of its slot, then the slot's drafts.
    word = tl.minimum(ahead, MAX_DRAFTS)
    last = tl.load(next_token + slot, mask=live, other=0)
    draft = tl.load(drafts + slot * MAX_DRAFTS + word - 1, mask=live & (word > 0), other=0)
    given = tl.load(token_ids + token, mask=is_token, other=0)
    kept = live & (token >= tl.load(query_start + 1 + row, mask=live, other=0) - RING)
    ring_row = tl.where(kept, ring_origin + slot * RING + position % RING, SINK_ROW)
    tl.store(ids + token, tl.where(live & continues, tl.where(word > 0, draft, last), given), mask=is_token)
    tl.store(positions + token, position, mask=is_token)
    tl.store(write_rows + token, ring_row.to(tl.int32), mask=is_token)
    tl.store(token_tags + token, tag, mask=is_token)
    return slot, position, tag, live


@jit_once
def find_addresses_kernel(
    query_start, token_ids, row_slots, row_continues, row_resume, row_start, row_tags, row_resume_tag,
    entry_rows, entry_snapshots, entry_boundaries, sample_rows, sample_offsets,
    length, next_token, drafts, ring_tags, pool_tags,
    table_0, table_1, table_2, table_3, stamps_0, stamps_1, stamps_2, stamps_3,
    starts, ids, positions, write_rows, token_tags, read_rows, read_tags, store_rows, store_tags, rows_intact,
    entry_sources, entry_source_tags, entry_dest, sample_tokens, sample_positions,
    slots_0, slots_1, slots_2, slots_3, completed_0, completed_1, completed_2, completed_3,
    num_tokens, num_rows, num_entries, num_samples, num_pages, pool_rows, ring_origin, snapshot_origin,
    GROUPS: tl.constexpr, STREAMS: tl.constexpr,
    HISTORY: tl.constexpr, RING: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_DRAFTS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr, ENTRY_BLOCK: tl.constexpr, SAMPLE_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """All results: a program works on one batch row, or on a block of tokens, entries or logits rows."""
    first_token = num_rows
    first_entry = first_token + tl.cdiv(num_tokens, TOKEN_BLOCK)
    first_sample = first_entry + tl.cdiv(num_entries, ENTRY_BLOCK)
    program, h = tl.program_id(0), tl.arange(0, BLOCK_H)
    if program < first_token:
        index_row(
            program, h, query_start, row_slots, row_continues, row_resume, row_start, row_tags, row_resume_tag, length,
            ring_tags, pool_tags, starts, read_rows, read_tags, store_rows, store_tags, rows_intact, pool_rows,
            ring_origin, snapshot_origin, STREAMS, HISTORY, RING, MAX_DRAFTS, BLOCK_S,
        )  # fmt: skip
    elif program < first_entry:
        token = (program - first_token) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
        there = token < num_tokens
        slot, position, tag, live = index_tokens(
            token, there, query_start, token_ids, row_slots, row_continues, row_start, row_tags, length, next_token,
            drafts, ids, positions, write_rows, token_tags, num_rows, ring_origin, RING, MAX_DRAFTS, ROW_BLOCK,
        )  # fmt: skip
        page_addresses(
            token, there, live, slot, position, tag, table_0, stamps_0, slots_0, completed_0, num_pages, PAGE_SIZE
        )
        if GROUPS > 1:
            page_addresses(
                token, there, live, slot, position, tag, table_1, stamps_1, slots_1, completed_1, num_pages, PAGE_SIZE
            )
        if GROUPS > 2:
            page_addresses(
                token, there, live, slot, position, tag, table_2, stamps_2, slots_2, completed_2, num_pages, PAGE_SIZE
            )
        if GROUPS > 3:
            page_addresses(
                token, there, live, slot, position, tag, table_3, stamps_3, slots_3, completed_3, num_pages, PAGE_SIZE
            )
    elif program < first_sample:
        entry = (program - first_entry) * ENTRY_BLOCK + tl.arange(0, ENTRY_BLOCK)
        index_entries(
            entry, entry < num_entries, h, query_start, row_slots, row_continues, row_resume, row_start, row_resume_tag,
            length, ring_tags, entry_rows, entry_snapshots, entry_boundaries, entry_sources, entry_source_tags,
            entry_dest, ring_origin, snapshot_origin, HISTORY, RING, MAX_DRAFTS,
        )  # fmt: skip
    else:
        sample = (program - first_sample) * SAMPLE_BLOCK + tl.arange(0, SAMPLE_BLOCK)
        index_samples(
            sample, sample < num_samples, query_start, row_slots, row_continues, row_start, length, sample_rows,
            sample_offsets, sample_tokens, sample_positions,
        )  # fmt: skip


@jit_once
def record_writes_kernel(
    query_start, starts, write_rows, token_tags, store_rows, store_tags, ring_tags,
    num_tokens, num_rows, ring_origin,
    HISTORY: tl.constexpr, RING: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ring tags as they must be once the step's kernels have run."""
    token_programs = tl.cdiv(num_tokens, BLOCK)
    program = tl.program_id(0)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        write_row = tl.load(write_rows + token, mask=token < num_tokens, other=SINK_ROW)
        token_tag = tl.load(token_tags + token, mask=token < num_tokens, other=0)
        tl.store(ring_tags + (write_row - ring_origin), token_tag, mask=write_row > SINK_ROW)
    else:
        row = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        h = tl.arange(0, BLOCK_H)[None, :]
        is_row = row < num_rows
        count = tl.load(query_start + 1 + row, mask=is_row, other=0) - tl.load(query_start + row, mask=is_row, other=0)
        # The last RING tokens are kept, each in a row of its own, and take the place of what was stored RING before.
        is_overwritten = h - HISTORY + RING < count[:, None]
        wanted = is_row[:, None] & (h < HISTORY)
        at = row[:, None] * HISTORY + h
        store_row = tl.load(store_rows + at, mask=wanted, other=SINK_ROW)
        store_tag = tl.load(store_tags + at, mask=wanted, other=0)
        tl.store(ring_tags + (store_row - ring_origin), store_tag, mask=(store_row > SINK_ROW) & ~is_overwritten)


def step_index(fields: list[Tensor], tables: list[Tensor], results: list[Tensor], sizes: list[int]) -> None:
    """As ``torch_index.step_index``, but for what slot 0 is left with. At most MAX_GROUPS page groups."""
    f, s = IndexFields(*fields), IndexSizes(*sizes)
    tokens, rows, entries, samples, deltas, groups, num_pages, streams, pool_rows = torch_index.index_counts(
        fields, tables
    )
    assert groups <= MAX_GROUPS, groups
    length, next_token, drafts, ring_tags, pool_tags = tables[: len(INDEX_TABLES)]
    assert drafts.shape[1] == s.max_drafts, (drafts.shape, s.max_drafts)
    found = dict(zip(INDEX_RESULTS, results, strict=False))
    paged, addresses = tables[len(INDEX_TABLES) :], results[len(INDEX_RESULTS) :]
    page_table, page_stamps = four(paged[:groups]), four(paged[groups:])
    write_slots, completed = four(addresses[:groups]), four(addresses[groups:])
    launch(
        apply_deltas_kernel,
        (triton.cdiv(deltas, DELTA_BLOCK),),
        f.delta_groups, f.delta_slots, f.delta_indices, f.delta_pages, f.delta_stamps, *page_table, *page_stamps,
        deltas, num_pages,
        BLOCK=DELTA_BLOCK,
    )  # fmt: skip
    found["rows_intact"] = found["rows_intact"].view(torch.uint8)
    block_h = triton.next_power_of_2(max(1, s.history))
    programs = triton.cdiv(tokens, TOKEN_BLOCK) + triton.cdiv(entries, ENTRY_BLOCK) + triton.cdiv(samples, SAMPLE_BLOCK)
    launch(
        find_addresses_kernel,
        (rows + programs,),
        *fields[: IndexFields._fields.index("delta_groups")], length, next_token, drafts, ring_tags, pool_tags,
        *page_table, *page_stamps, *found.values(), *write_slots, *completed,
        tokens, rows, entries, samples, num_pages, pool_rows, s.ring_origin, s.snapshot_origin,
        GROUPS=groups, STREAMS=streams, HISTORY=s.history, RING=s.ring_length, PAGE_SIZE=s.page_size,
        MAX_DRAFTS=s.max_drafts, BLOCK_H=block_h, BLOCK_S=triton.next_power_of_2(max(1, streams)),
        TOKEN_BLOCK=TOKEN_BLOCK, ENTRY_BLOCK=ENTRY_BLOCK, SAMPLE_BLOCK=SAMPLE_BLOCK, ROW_BLOCK=ROW_BLOCK,
    )  # fmt: skip
    launch(
        record_writes_kernel,
        (triton.cdiv(tokens, RECORD_BLOCK) + triton.cdiv(rows, RECORD_BLOCK),),
        f.query_start, found["row_start"], found["write_rows"], found["token_tags"], found["store_rows"],
        found["store_tags"], ring_tags, tokens, rows, s.ring_origin,
        HISTORY=s.history, RING=s.ring_length, BLOCK_H=block_h, BLOCK=RECORD_BLOCK,
    )  # fmt: skip


def four(items: list[Any]) -> list[Any]:  # Any: tensors or sizes
    """One for each group a kernel can have; nothing is done with those beyond the groups there are."""
    return (items + MAX_GROUPS * items[:1])[:MAX_GROUPS]


@jit_once
def accept_kernel(
    drawn, token_ids, query_start, row_slots, row_start, row_drafts, row_first_draw, length, next_token, accepted,
    num_rows,
    MAX_DRAFTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many drafts of each batch row are what was drawn in their places; its slot's length and last token follow."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    first = tl.load(query_start + row, mask=is_row, other=0)
    end = tl.load(query_start + 1 + row, mask=is_row, other=0)
    count = tl.load(row_drafts + row, mask=is_row, other=0)
    first_draw = tl.load(row_first_draw + row, mask=is_row, other=-1)
    ahead = tl.arange(0, BLOCK_D)[None, :]
    is_draft = (ahead < count[:, None]) & (ahead < MAX_DRAFTS)
    guess = tl.load(token_ids + (end - count)[:, None] + ahead, mask=is_draft, other=0)
    answer = tl.load(drawn + first_draw[:, None] + ahead, mask=is_draft, other=0)
    found = tl.min(tl.where(is_draft & (guess == answer), BLOCK_D, ahead), axis=1)
    tl.store(accepted + row, found, mask=is_row)
    slot = tl.load(row_slots + row, mask=is_row, other=0)
    start = tl.load(row_start + row, mask=is_row, other=0)
    tl.store(length + slot, (start + end - first - count + found).to(tl.int64), mask=slot > 0)
    draws = is_row & (first_draw >= 0)
    last = tl.load(drawn + first_draw + found, mask=draws, other=0)
    tl.store(next_token + slot, last, mask=draws & (slot > 0))


def accept(
    drawn: Tensor,
    token_ids: Tensor,
    query_start: Tensor,
    row_slots: Tensor,
    row_start: Tensor,
    row_drafts: Tensor,
    row_first_draw: Tensor,
    length: Tensor,
    next_token: Tensor,
    max_drafts: int,
) -> Tensor:
    """As ``torch_index.accept``, but that slot 0 takes nothing."""
    accepted = torch.empty_like(row_slots)
    num_rows = row_slots.shape[0]
    launch(
        accept_kernel,
        (triton.cdiv(num_rows, ACCEPT_BLOCK),),
        drawn, token_ids, query_start, row_slots, row_start, row_drafts, row_first_draw, length, next_token, accepted,
        num_rows,
        MAX_DRAFTS=max_drafts, BLOCK_D=triton.next_power_of_2(max(1, max_drafts)), BLOCK=ACCEPT_BLOCK,
    )  # fmt: skip
    return accepted
