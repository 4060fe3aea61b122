"""Which pieces of work attention consists of, found on the device by every program for itself.

A batch row is cut into tiles of query rows (a token under each query head of a KV head), and its keys into chunks at absolute
multiples. A row of few query rows and more chunks than fall to a program is split: every chunk is an item. Otherwise an item walks
all chunks of a tile. Items are numbered row after row, so a fixed number of programs walks any batch. Which rows are split depends
on the sizes of all and, where scratch memory ends, on the rows before them; it changes no bits. Knows no scores.
"""

import triton
import triton.language as tl

INDEX = ["query_start", "row_start", "num_rows", "window", "capacity", "programs"]
"""Arguments that differ from batch to batch, for which nothing is compiled anew."""


@triton.jit
def row_sizes(
    query_start,
    row_start,
    row,  # one or many
    num_rows,
    window,
    BLOCK_TOKENS: tl.constexpr,  # tokens of every row that see keys outside of pages as well; 0: query_start says
    CHUNK: tl.constexpr,
):
    """First token, tokens and first position of batch rows, the first chunk that they see, and how many."""
    is_row = row < num_rows
    start = tl.load(row_start + row, mask=is_row, other=0)
    if BLOCK_TOKENS > 0:
        first = row * BLOCK_TOKENS
        count = tl.where(is_row, BLOCK_TOKENS, 0)
        end = start
    else:
        first = tl.load(query_start + row, mask=is_row, other=0)
        count = tl.load(query_start + row + 1, mask=is_row, other=0) - first
        end = start + count
    first_chunk = tl.maximum(start - window + 1, 0) // CHUNK
    chunks = tl.cdiv(end, CHUNK) - first_chunk + (1 if BLOCK_TOKENS > 0 else 0)
    return first, count, start, first_chunk, chunks


@triton.jit
def row_items(
    query_start,
    row_start,
    num_rows,
    window,
    capacity,  # partial results that scratch memory has room for; 0: no row is split
    programs,  # that share the chunks of all rows
    BLOCK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    SPLIT_ABOVE: tl.constexpr,  # a row is split that has more than this many shares
    IS_LONG: tl.constexpr,  # take rows of more than SHORT_ROWS query rows, else the others
    BLOCK_B: tl.constexpr,
):
    """For all batch rows [BLOCK_B]: where their items end, 1 where split, where their partial results begin."""
    rows = tl.arange(0, BLOCK_B)
    _, count, _, _, chunks = row_sizes(query_start, row_start, rows, num_rows, window, BLOCK_TOKENS, CHUNK)
    query_rows = count * GROUP
    is_mine = query_rows > SHORT_ROWS if IS_LONG else query_rows <= SHORT_ROWS
    whole = tl.where(is_mine, tl.cdiv(query_rows, BLOCK_M) * KV_HEADS, 0)
    share = tl.cdiv(tl.sum(whole * chunks, 0), programs)
    wanted = tl.where(chunks > tl.maximum(share * SPLIT_ABOVE, 1), whole * chunks, 0)
    partials_end = tl.cumsum(wanted, 0)
    is_split = (wanted > 0) & (partials_end <= capacity)
    ends = tl.cumsum(tl.where(is_split, wanted, whole), 0)
    return ends, is_split.to(tl.int32), partials_end - wanted


@triton.jit
def find_row(ends, item):
    """The batch row that an item belongs to, and the number of its first item."""
    is_before = ends <= item
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, ends, 0), 0)


@triton.jit
def value_of(values, row, BLOCK_B: tl.constexpr):
    """``values[row]`` of integers [BLOCK_B] in registers."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_B) == row, values, 0), 0)
