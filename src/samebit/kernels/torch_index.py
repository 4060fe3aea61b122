"""Addresses of a step in plain torch: the twin of native/index.c. Static shapes, no value read by the host.

Knows the order of its arguments (values.py), and nothing of requests, models or who fills the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from samebit.kernels.values import INDEX_TABLES, SINK_ROW, ZERO_ROW, IndexFields, IndexSizes

TAG_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""Tags of neighbouring positions differ by this, in wrapping int64 arithmetic."""


class _Tables(NamedTuple):
    length: Tensor
    next_token: Tensor
    drafts: Tensor
    ring_tags: Tensor
    row_tags: Tensor
    page_table: list[Tensor]
    page_stamps: list[Tensor]


class _Rows(NamedTuple):
    """Per batch row: slot, first position, snapshot to resume from (0: none)."""

    slot: Tensor
    start: Tensor
    resume: Tensor


class _Tokens(NamedTuple):
    """Per token: batch row, slot (0: padding), position, tag, and whether it is live."""

    row: Tensor
    slot: Tensor
    position: Tensor
    tag: Tensor
    live: Tensor


def index_counts(fields: list[Tensor], tables: list[Tensor]) -> tuple[int, ...]:
    """Tokens, batch rows, entries, logits rows, page deltas, groups, pages of a slot, streams and rows of the pools."""
    f, t = _named(fields, tables)
    rows, pool = f.row_slots.shape[0], t.row_tags.shape
    sizes = (f.token_ids.shape[0], rows, f.entry_rows.shape[0], f.sample_rows.shape[0], f.delta_slots.shape[0])
    return (*sizes, len(t.page_table), t.page_table[0].shape[1], *pool)


def index_results(fields: list[Tensor], tables: list[Tensor], sizes: IndexSizes) -> list[Tensor]:
    """Results of the right shapes and dtypes, not yet written."""
    tokens, rows, entries, samples, _, groups, *_ = index_counts(fields, tables)
    history = sizes.history
    narrow, wide = torch.int32, torch.int64
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((rows,), narrow),
        *(((tokens,), dtype) for dtype in (narrow, wide, narrow, wide)),
        *(((rows, history), dtype) for dtype in (narrow, wide, narrow, wide)),
        ((rows,), torch.bool),
        *(((entries, history), dtype) for dtype in (narrow, wide, narrow)),
        *(((samples,), wide) for _ in range(2)),
        *(((tokens,), narrow) for _ in range(2 * groups)),
    ]
    return [fields[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def step_index(fields: list[Tensor], tables: list[Tensor], results: list[Tensor], sizes: list[int]) -> None:
    f, t = _named(fields, tables)
    s = IndexSizes(*sizes)
    _apply_page_deltas(f, t)
    slot = f.row_slots.long()
    start = torch.where(f.row_continues != 0, t.length[slot], f.row_start)
    rows = _Rows(slot, start, f.row_resume.long())
    tokens = _tokens(f, rows)
    words = torch.cat([t.next_token[:, None], t.drafts], dim=1)
    offset = (tokens.position - start[tokens.row]).clamp(0, words.shape[1] - 1)
    ids = torch.where((f.row_continues[tokens.row] != 0) & tokens.live, words[tokens.slot, offset], f.token_ids)
    read_rows, read_tags, store_rows, store_tags = _row_addresses(f, t, s, rows)
    intact = (t.row_tags[:, read_rows] == read_tags).all(dim=2).all(dim=0)
    write_rows = _write_rows(f, s, tokens)
    entries = _entry_addresses(f, t, s, rows)
    pages = [_page_addresses(table, s, tokens) for table in t.page_table]
    _record_writes(f, t, s, rows, tokens, store_rows, write_rows)
    sample_row = f.sample_rows.long()
    found = [
        start.int(),
        *(ids, tokens.position, write_rows.int(), tokens.tag),
        *(read_rows.int(), read_tags, store_rows.int(), store_tags, intact),
        *entries,
        f.query_start[sample_row].long() + f.sample_offsets,
        start[sample_row] + f.sample_offsets + 1,
        *(slots for slots, _ in pages),
        *(completed for _, completed in pages),
    ]
    for result, values in zip(results, found, strict=True):
        assert result.dtype is values.dtype, (result.dtype, values.dtype)
        result.copy_(values)


def _named(fields: list[Tensor], tables: list[Tensor]) -> tuple[IndexFields, _Tables]:
    words = dict(zip(INDEX_TABLES, tables, strict=False))
    paged = tables[len(INDEX_TABLES) :]
    half = len(paged) // 2
    return IndexFields(*fields), _Tables(**words, page_table=paged[:half], page_stamps=paged[half:])


def _apply_page_deltas(f: IndexFields, t: _Tables) -> None:
    slots, indices = f.delta_slots.long(), f.delta_indices.long()
    for g, (table, stamps) in enumerate(zip(t.page_table, t.page_stamps, strict=True)):
        mine = f.delta_groups == g
        where = (torch.where(mine, slots, 0), torch.where(mine, indices, 0))
        table[where] = torch.where(mine, f.delta_pages, 0)
        stamps[where] = torch.where(mine, f.delta_stamps, 0)


def _tokens(f: IndexFields, rows: _Rows) -> _Tokens:
    number = torch.arange(f.token_ids.shape[0], device=f.token_ids.device)
    row = torch.searchsorted(f.query_start[1:].long(), number, right=True)
    live = row < rows.slot.shape[0]
    row = row.clamp(max=rows.slot.shape[0] - 1)
    position = torch.where(live, rows.start[row] + number - f.query_start[row], 0)
    tag = torch.where(live, f.row_tags[row] + position * TAG_STEP, 0)
    return _Tokens(row, torch.where(live, rows.slot[row], 0), position, tag, live)


def _ring_rows(s: IndexSizes, slot: Tensor, position: Tensor) -> Tensor:
    return s.ring_origin + slot * s.ring_length + position % s.ring_length


def _history(s: IndexSizes, like: Tensor) -> Tensor:
    return torch.arange(-s.history, 0, device=like.device)


def _history_rows(
    f: IndexFields, t: _Tables, s: IndexSizes, rows: _Rows, row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Pool rows that hold `position` [N, K-1] before the step, for batch rows `row` [N], and the tags they must carry."""
    resume, slots = rows.resume[row][:, None], rows.slot[row][:, None]
    from_snapshot = s.snapshot_origin + resume * s.history + position - (rows.start[row][:, None] - s.history)
    before = position < 0
    found = torch.where(before, ZERO_ROW, _ring_rows(s, slots, position))
    # A position that the ring has left behind shares its row with a later one, whose tag must not pass for its own.
    is_gone = position < t.length[slots] + s.max_drafts - s.ring_length
    tags = torch.where(before, 0, t.ring_tags[slots, position % s.ring_length] ^ is_gone.long())
    resumes = resume > 0
    return torch.where(resumes, from_snapshot, found), torch.where(resumes, f.row_resume_tag[row][:, None], tags)


def _row_addresses(f: IndexFields, t: _Tables, s: IndexSizes, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    position = rows.start[:, None] + _history(s, rows.slot)
    everyone = torch.arange(rows.slot.shape[0], device=rows.slot.device)
    read_rows, read_tags = _history_rows(f, t, s, rows, everyone, position)
    stores = (rows.resume[:, None] > 0) & (position >= 0)
    store_rows = torch.where(stores, _ring_rows(s, rows.slot[:, None], position), SINK_ROW)
    return read_rows, read_tags, store_rows, f.row_tags[:, None] + position * TAG_STEP


def _write_rows(f: IndexFields, s: IndexSizes, tokens: _Tokens) -> Tensor:
    number = torch.arange(tokens.row.shape[0], device=tokens.row.device)
    kept = tokens.live & (number >= f.query_start[1:][tokens.row] - s.ring_length)
    return torch.where(kept, _ring_rows(s, tokens.slot, tokens.position), SINK_ROW)


def _entry_addresses(f: IndexFields, t: _Tables, s: IndexSizes, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    row = f.entry_rows.long()
    position = f.entry_boundaries[:, None] + _history(s, row)
    pool_rows, pool_tags = _history_rows(f, t, s, rows, row, position)
    ahead = position - rows.start[row][:, None]
    in_step = ahead >= 0
    sources = torch.where(in_step, f.query_start[row][:, None] + ahead, -(pool_rows + 1))
    snapshot = f.entry_snapshots.long()[:, None]
    dest = s.snapshot_origin + (snapshot + 1) * s.history + _history(s, row)
    return (
        sources.int(),
        torch.where(in_step, 0, pool_tags),
        torch.where(snapshot > 0, dest, SINK_ROW).int(),
    )


def _page_addresses(table: Tensor, s: IndexSizes, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    page = table[tokens.slot, tokens.position // s.page_size]
    offset = tokens.position % s.page_size
    completes = tokens.live & (offset == s.page_size - 1)
    slots = torch.where(tokens.live, page * s.page_size + offset, 0)
    return slots.int(), torch.where(completes, page, 0)


def _record_writes(
    f: IndexFields, t: _Tables, s: IndexSizes, rows: _Rows, tokens: _Tokens, store_rows: Tensor, write_rows: Tensor
) -> None:
    """Ring tags and page stamps as they must be once the step's kernels have run; slot 0 takes what is unwanted."""
    position = rows.start[:, None] + _history(s, rows.slot)
    stored = torch.where(store_rows != SINK_ROW, rows.slot[:, None], 0)
    t.ring_tags[stored, position % s.ring_length] = f.row_tags[:, None] + position * TAG_STEP
    written = torch.where(write_rows != SINK_ROW, tokens.slot, 0)
    t.ring_tags[written, tokens.position % s.ring_length] = tokens.tag
    completes = tokens.live & (tokens.position % s.page_size == s.page_size - 1)
    where = (torch.where(completes, tokens.slot, 0), torch.where(completes, tokens.position // s.page_size, 0))
    for stamps in t.page_stamps:
        stamps[where] = tokens.tag


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
    slot, end = row_slots.long(), query_start[1:]
    ahead = torch.arange(max_drafts, device=drawn.device)
    guess = (end - row_drafts)[:, None] + ahead
    answer = row_first_draw[:, None] + ahead
    is_draft = ahead < row_drafts[:, None]
    same = token_ids[torch.where(is_draft, guess, 0)] == drawn[torch.where(is_draft, answer, 0)]
    accepted = (same & is_draft).int().cumprod(dim=1).sum(dim=1)
    length[slot] = row_start.long() + query_start.diff() - row_drafts + accepted
    draws = row_first_draw >= 0
    last = drawn[torch.where(draws, row_first_draw + accepted, 0)]
    next_token[torch.where(draws, slot, 0)] = last
    return accepted.int()


def acknowledge(
    entry_rows: Tensor,
    boundaries: Tensor,
    tags: Tensor,
    dest: Tensor,
    row_slots: Tensor,
    row_tags: Tensor,
    found: list[Tensor],
    table: list[Tensor],
    stamps: list[Tensor],
    windows: list[int],
    page_size: int,
) -> tuple[Tensor, Tensor]:
    slot = row_slots.long()[entry_rows.long()]
    pages_intact = torch.ones_like(slot, dtype=torch.bool)
    page = torch.arange(table[0].shape[1], device=slot.device)
    last = boundaries // page_size
    for actual, pages, expected, window in zip(found, table, stamps, windows, strict=True):
        low = (boundaries - window + 1).clamp(min=0) // page_size if window else torch.zeros_like(last)
        outside = (page < low[:, None]) | (page >= last[:, None])
        same = (actual[:, pages[slot].long()] == expected[slot]).all(dim=0)
        pages_intact &= (same | outside).all(dim=1)
    written = (row_tags[:, dest.long()] == tags[:, None]) & (dest != SINK_ROW)
    return pages_intact, written.all(dim=2).all(dim=0)
