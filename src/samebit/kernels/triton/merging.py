"""Results of tiles; where a row is split, what its chunks came to is merged in the order in which one program would have walked them.

The program that stores the last chunk of a tile merges all. It loads several chunks before it needs the first of them: what a merge
takes is how often it waits for memory. Knows no keys.
"""

import triton
import triton.language as tl

from samebit.kernels.triton.last import PAST_L1, is_last
from samebit.kernels.triton.softmax import merge, merge_tops

FEW_ROWS, SOME_ROWS = tl.constexpr(4), tl.constexpr(8)
"""Query rows that are merged where a tile has no more, and with them twice as many chunks at once as where it has more."""


@triton.jit
def store_tile(
    out, sums, total, first, count, tile, head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the result of a tile's first query rows: ``sums`` [M, BLOCK_D] over the sums of weights ``total`` [M].

    Which sign a sum has that comes down to 0 depends on how many chunks of no weight were added behind it: a result has none.
    """
    query_row = tile * BLOCK_M + tl.arange(0, sums.shape[0])
    place = query_row // GROUP
    is_query = place < count
    result = sums * tl.div_rn(1.0, tl.where(is_query, total, 1.0))[:, None] + 0.0
    column = tl.arange(0, sums.shape[1])[None, :]
    token = (first + place).to(tl.int64)
    at = ((token * KV_HEADS * GROUP + head * GROUP + query_row % GROUP) * WIDTH)[:, None] + column
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_query[:, None] & (column < WIDTH))


@triton.jit
def share_tile(
    out, partial_sums, partial_scales, counter, partial, part, parts, sums, total, top, first, count, tile, head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Keep what chunk ``part`` of a tile came to as partial result ``partial``; whoever does so last of ``parts`` stores the tile's."""
    BLOCK_D: tl.constexpr = sums.shape[1]
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    is_query = (tile * BLOCK_M + row) // GROUP < count
    at = partial.to(tl.int64) * BLOCK_M + row
    tl.store(partial_scales + at * 2, top, mask=is_query)
    tl.store(partial_scales + at * 2 + 1, total, mask=is_query)
    tl.store(partial_sums + at[:, None] * BLOCK_D + column, sums, mask=is_query[:, None])
    partial -= part
    if is_last(counter + partial, parts):
        if count * GROUP <= FEW_ROWS:
            merge_tile(
                out, partial_sums, partial_scales, partial, parts, first, count, tile, head, GROUP, KV_HEADS, WIDTH,
                BLOCK_M, BLOCK_D, FEW_ROWS, 8,
            )  # fmt: skip
        elif count * GROUP <= SOME_ROWS:
            merge_tile(
                out, partial_sums, partial_scales, partial, parts, first, count, tile, head, GROUP, KV_HEADS, WIDTH,
                BLOCK_M, BLOCK_D, SOME_ROWS, 8,
            )  # fmt: skip
        else:
            merge_tile(
                out, partial_sums, partial_scales, partial, parts, first, count, tile, head, GROUP, KV_HEADS, WIDTH,
                BLOCK_M, BLOCK_D, BLOCK_M, 4,
            )  # fmt: skip


@triton.jit
def merge_tile(
    out, partial_sums, partial_scales, partial, chunks, first, count, tile, head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # the tile has no query rows behind these
    AT_ONCE: tl.constexpr,  # chunks that are loaded together
):  # fmt: skip
    """Merge and store a tile, whose partial results are there from ``partial`` on."""
    row = tl.arange(0, ROWS)
    is_query = (tile * BLOCK_M + row) // GROUP < count
    column = tl.arange(0, BLOCK_D)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first_chunk in tl.range(0, chunks, AT_ONCE, num_stages=1):
        for i in tl.static_range(AT_ONCE):
            at = (partial + first_chunk + i).to(tl.int64) * BLOCK_M + row
            wanted = is_query & (first_chunk + i < chunks)
            next_top = tl.load(partial_scales + at * 2, mask=wanted, other=float("-inf"), cache_modifier=PAST_L1)
            next_total = tl.load(partial_scales + at * 2 + 1, mask=wanted, other=0.0, cache_modifier=PAST_L1)
            next_sums = tl.load(
                partial_sums + at[:, None] * BLOCK_D + column, mask=wanted[:, None], other=0.0, cache_modifier=PAST_L1
            )
            top, kept, added = merge_tops(top, next_top)
            total = merge(total, kept, next_total, added)
            sums = merge(sums, kept[:, None], next_sums, added[:, None])
    store_tile(out, sums, total, first, count, tile, head, GROUP, KV_HEADS, WIDTH, BLOCK_M)
