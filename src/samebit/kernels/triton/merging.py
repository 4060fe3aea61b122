"""Merges what the chunks of split rows came to, in the order in which one program would have walked them. Knows no keys."""

import triton
import triton.language as tl

from samebit.kernels.triton.items import INDEX, find_row, row_items, row_sizes, value_of
from samebit.kernels.triton.softmax import merge, merge_tops


@triton.jit(do_not_specialize=INDEX)
def merge_kernel(
    query_start,
    row_start,
    out,
    partial_sums,
    partial_scales,
    num_rows,
    window,
    capacity,
    programs,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    SPLIT_ABOVE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """An item is a query row of a KV head."""
    _ends, is_split, first_partial, query_rows = row_items(
        query_start, row_start, num_rows, window, capacity, programs, BLOCK_TOKENS, CHUNK, GROUP, KV_HEADS, BLOCK_M,
        SHORT_ROWS, SPLIT_ABOVE, False, BLOCK_B,
    )  # fmt: skip
    ends = tl.cumsum(is_split * query_rows * KV_HEADS, 0)
    column = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        row, first_item = find_row(ends, item)
        first, count, _start, _first_chunk, chunks = row_sizes(
            query_start, row_start, row, num_rows, window, BLOCK_TOKENS, CHUNK
        )
        head, query_row = (item - first_item) % KV_HEADS, (item - first_item) // KV_HEADS
        piece = (tl.cdiv(count * GROUP, BLOCK_M) - 1 - query_row // BLOCK_M) * KV_HEADS + head
        partial = value_of(first_partial, row, BLOCK_B) + piece * chunks
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        sums = tl.zeros((BLOCK_D,), tl.float32)
        for chunk in tl.range(0, chunks, loop_unroll_factor=4):
            at = (partial + chunk).to(tl.int64) * BLOCK_M + query_row % BLOCK_M + tl.arange(0, 1)
            next_top, next_total = tl.load(partial_scales + at * 2), tl.load(partial_scales + at * 2 + 1)
            next_sums = tl.load(partial_sums + at * BLOCK_D + column)
            top, kept, added = merge_tops(top, next_top)
            total = merge(total, kept, next_total, added)
            sums = merge(sums, kept, next_sums, added)
        result = sums * tl.div_rn(1.0, total)
        token = (first + query_row // GROUP).to(tl.int64)
        at = (token * KV_HEADS * GROUP + head * GROUP + query_row % GROUP) * WIDTH + column
        tl.store(out + at, result.to(out.dtype.element_ty), mask=column < WIDTH)
