"""Whether what a step was to write is there: the twin is ``torch_index.acknowledge``. Knows tags only.

A few programs share an entry's pages. Both answers of an entry start as yes, and whoever finds a wrong tag writes no, so nothing is
merged. What an entry does not have is never looked for: one without pages and rows costs a load of its words, and its rows were not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.index import SINK_ROW, four, jit_once
from samebit.kernels.triton.launch import launch

MAX_PARTS = 8
"""Programs that share the pages of an entry at most."""
PAGES, LAYERS, STREAMS = 64, 16, 32
"""Pages, layers and streams that are compared at once."""


@triton.jit
def pages_differ(
    part, slot, boundary, found, table, stamps, window, layers, pool_pages, num_pages, page_size, parts,
    PAGES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """How many of a part of a group's pages below ``boundary`` carry another tag than their stamp in some layer."""
    low = tl.where(window > 0, tl.maximum(boundary - window + 1, 0) // page_size, 0).to(tl.int32)
    last = (boundary // page_size).to(tl.int32)
    wrong = tl.zeros((PAGES,), tl.int32)
    for first in range(low + part * PAGES, last, parts * PAGES):
        page = first + tl.arange(0, PAGES)
        there = page < last
        at = slot.to(tl.int64) * num_pages + page
        row, stamp = tl.load(table + at, mask=there, other=0), tl.load(stamps + at, mask=there, other=0)
        for first_layer in range(0, layers, LAYERS):
            layer = first_layer + tl.arange(0, LAYERS)[:, None]
            compared = (layer < layers) & there[None, :]
            tag = tl.load(found + layer.to(tl.int64) * pool_pages + row[None, :], mask=compared, other=0)
            wrong += tl.sum((compared & (tag != stamp[None, :])).to(tl.int32), axis=0)
    return tl.sum(wrong, axis=0)


@jit_once
def acknowledge_kernel(
    entry_rows, boundaries, tags, dest, row_slots, row_tags,
    found_0, found_1, found_2, found_3, table_0, table_1, table_2, table_3, stamps_0, stamps_1, stamps_2, stamps_3,
    pages_intact, rows_written,
    window_0, window_1, window_2, window_3, layers_0, layers_1, layers_2, layers_3, pool_0, pool_1, pool_2, pool_3,
    num_pages, page_size, parts, streams, pool_rows,
    GROUPS: tl.constexpr, HISTORY: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGES: tl.constexpr, LAYERS: tl.constexpr, STREAMS: tl.constexpr,
):  # fmt: skip
    """A program for each entry and part of its pages; the first also looks at the entry's rows."""
    entry, part = tl.program_id(0), tl.program_id(1)
    boundary = tl.load(boundaries + entry)
    if boundary >= page_size:
        slot = tl.load(row_slots + tl.load(entry_rows + entry))
        wrong = pages_differ(
            part, slot, boundary, found_0, table_0, stamps_0, window_0, layers_0, pool_0, num_pages, page_size, parts,
            PAGES, LAYERS,
        )  # fmt: skip
        if GROUPS > 1:
            wrong += pages_differ(
                part, slot, boundary, found_1, table_1, stamps_1, window_1, layers_1, pool_1, num_pages, page_size,
                parts, PAGES, LAYERS,
            )  # fmt: skip
        if GROUPS > 2:
            wrong += pages_differ(
                part, slot, boundary, found_2, table_2, stamps_2, window_2, layers_2, pool_2, num_pages, page_size,
                parts, PAGES, LAYERS,
            )  # fmt: skip
        if GROUPS > 3:
            wrong += pages_differ(
                part, slot, boundary, found_3, table_3, stamps_3, window_3, layers_3, pool_3, num_pages, page_size,
                parts, PAGES, LAYERS,
            )  # fmt: skip
        if wrong > 0:
            tl.store(pages_intact + entry, 0)
    if part == 0:
        h = tl.arange(0, BLOCK_H)
        row = tl.load(dest + entry * HISTORY + h, mask=h < HISTORY, other=SINK_ROW)
        missing = ((h < HISTORY) & (row <= SINK_ROW)).to(tl.int32)
        if tl.max(row, axis=0) > SINK_ROW:
            expected = tl.load(tags + entry)
            for first in range(0, streams, STREAMS):
                stream = first + tl.arange(0, STREAMS)[:, None]
                compared = (stream < streams) & (row > SINK_ROW)[None, :]
                tag = tl.load(row_tags + stream.to(tl.int64) * pool_rows + row[None, :], mask=compared, other=0)
                missing += tl.sum((compared & (tag != expected)).to(tl.int32), axis=0)
        if tl.sum(missing, axis=0) > 0:
            tl.store(rows_written + entry, 0)


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
    """As ``torch_index.acknowledge``. At most MAX_GROUPS page groups."""
    (entries, history), num_pages, groups = dest.shape, table[0].shape[1], len(windows)
    streams, pool_rows = row_tags.shape
    answers = torch.ones(2, entries, dtype=torch.bool, device=dest.device)
    intact, written = answers.view(torch.uint8)
    parts = min(MAX_PARTS, triton.cdiv(num_pages, PAGES))
    layers, pool_pages = ([tags.shape[axis] for tags in found] for axis in (0, 1))
    launch(
        acknowledge_kernel,
        (entries, parts),
        entry_rows, boundaries, tags, dest, row_slots, row_tags, *four(found), *four(table), *four(stamps),
        intact, written, *four(windows), *four(layers), *four(pool_pages),
        num_pages, page_size, parts, streams, pool_rows,
        GROUPS=groups, HISTORY=history, BLOCK_H=triton.next_power_of_2(max(1, history)),
        PAGES=PAGES, LAYERS=LAYERS, STREAMS=STREAMS,
    )  # fmt: skip
    return answers[0], answers[1]
