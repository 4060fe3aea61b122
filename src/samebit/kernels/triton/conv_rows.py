"""Pool rows in which a convolution's inputs are kept: read, written from a step's tokens, and copied to checkpoint entries.

Knows not in which order that may be done (``conv_programs``).
"""

import triton
import triton.language as tl

from samebit.kernels import values

SINK_ROW = tl.constexpr(values.SINK_ROW)


@triton.jit
def step_inputs(x, token, channel, wanted, x_stride, KEPT: tl.constexpr):
    """Inputs of ``token`` as the pool keeps them; its shape and that of ``channel`` broadcast."""
    return tl.load(x + token.to(tl.int64) * x_stride + channel, mask=wanted, other=0.0).to(KEPT)


@triton.jit
def pool_inputs(rows, row, channel, wanted, CHANNELS: tl.constexpr):
    """Pool rows ``row``; its shape and that of ``channel`` broadcast."""
    return tl.load(rows + row.to(tl.int64) * CHANNELS + channel, mask=wanted, other=0.0)


@triton.jit
def is_among(row, table, first, last, BLOCK: tl.constexpr):
    """Whether each of pool rows ``row`` [N] that can be written is one of ``table`` [first:last]."""
    found = tl.zeros_like(row)
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        other = tl.load(table + place, mask=place < last, other=-1)
        found += tl.sum((row[:, None] == other[None, :]).to(tl.int32), axis=1)
    return (found > 0) & (row > SINK_ROW)


@triton.jit
def dest_rows(dest, first, num_dest, SCAN: tl.constexpr):
    """SCAN of ``num_dest`` pool rows from ``first`` on; the sink beyond them."""
    place = first + tl.arange(0, SCAN)
    return tl.load(dest + place, mask=place < num_dest, other=SINK_ROW)


@triton.jit
def copy_to_entry(
    x, rows, row_tags, read_rows, entry_sources, entry_source_tags, entry_dest, entry_tag, entry, first, last, channel,
    x_stride, is_first,
    IS_AMONG: tl.constexpr, HISTORY: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy those sources of an entry, and their tags, that are among ``read_rows`` [first:last], or are not."""
    h, is_channel = tl.arange(0, BLOCK_H), channel < CHANNELS
    at = entry * HISTORY + h
    source = tl.load(entry_sources + at, mask=h < HISTORY, other=0)
    dest = tl.load(entry_dest + at, mask=h < HISTORY, other=SINK_ROW)
    tag, expected = tl.load(entry_tag + entry), tl.load(entry_source_tags + at, mask=h < HISTORY, other=0)
    wanted = (dest > SINK_ROW) & (is_among(-(source + 1), read_rows, first, last, BLOCK) == IS_AMONG)
    from_pool = source < 0
    own_wanted, kept_wanted = (wanted & ~from_pool)[:, None] & is_channel, (wanted & from_pool)[:, None] & is_channel
    pool_row = tl.where(from_pool, -(source + 1), 0)
    own = step_inputs(x, source[:, None], channel, own_wanted, x_stride, rows.dtype.element_ty)
    kept = pool_inputs(rows, pool_row[:, None], channel, kept_wanted, CHANNELS)
    found = tl.load(row_tags + pool_row, mask=wanted & from_pool & is_first, other=0)
    to = rows + dest.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(to, own, mask=own_wanted)
    tl.store(to, kept, mask=kept_wanted)
    # A stale source spoils the copy's tag.
    tl.store(row_tags + dest, tag ^ tl.where(from_pool, found ^ expected, 0), mask=wanted & is_first)


@triton.jit
def copy_entries(
    x, rows, row_tags, read_rows, entry_sources, entry_source_tags, entry_dest, entry_tag, row, channel, num_rows,
    num_entries, x_stride, is_first,
    HISTORY: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr, SCAN: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy what entries take from the history of batch row ``row``, and of each num_rows-th what is in no history."""
    num_sources, first = num_entries * HISTORY, row * HISTORY
    low, high = num_sources, -1
    for start in range(0, num_sources, SCAN):
        place = start + tl.arange(0, SCAN)
        source = tl.load(entry_sources + place, mask=place < num_sources, other=0)
        dest = dest_rows(entry_dest, start, num_sources, SCAN)
        is_own = (dest > SINK_ROW) & is_among(-(source + 1), read_rows, first, first + HISTORY, BLOCK_H)
        low = tl.minimum(low, tl.min(tl.where(is_own, place, num_sources), axis=0))
        high = tl.maximum(high, tl.max(tl.where(is_own, place, -1), axis=0))
    for entry in range(low // HISTORY, (high + HISTORY) // HISTORY):
        copy_to_entry(
            x, rows, row_tags, read_rows, entry_sources, entry_source_tags, entry_dest, entry_tag, entry, first,
            first + HISTORY, channel, x_stride, is_first, True, HISTORY, CHANNELS, BLOCK_H, BLOCK_H,
        )  # fmt: skip
    for entry in range(row, num_entries, num_rows):
        copy_to_entry(
            x, rows, row_tags, read_rows, entry_sources, entry_source_tags, entry_dest, entry_tag, entry, 0,
            num_rows * HISTORY, channel, x_stride, is_first, False, HISTORY, CHANNELS, BLOCK_H, ROW_BLOCK,
        )  # fmt: skip


@triton.jit
def tokens_to_keep(
    x, write_rows, write_tags, token, last, channel, x_stride, is_first, KEPT: tl.constexpr, CHANNELS: tl.constexpr
):
    """Pool rows, tags and inputs of those of ``token`` [N] that lie before ``last``; the sink for the others."""
    live = token < last
    row = tl.load(write_rows + token, mask=live, other=SINK_ROW)
    tag = tl.load(write_tags + token, mask=live & is_first, other=0)
    return row, tag, step_inputs(x, token[:, None], channel, live[:, None] & (channel < CHANNELS), x_stride, KEPT)


@triton.jit
def put_tokens(rows, row_tags, row, tag, value, channel, is_first, CHANNELS: tl.constexpr):
    """Write inputs and tags to pool rows ``row`` [N], but for the sink."""
    at = rows + row.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(at, value, mask=(row > SINK_ROW)[:, None] & (channel < CHANNELS))
    tl.store(row_tags + row, tag, mask=(row > SINK_ROW) & is_first)


@triton.jit
def put_later_tokens(
    x, rows, row_tags, write_rows, write_tags, first, last, channel, x_stride, is_first,
    CHANNELS: tl.constexpr, BLOCK_T: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Write the inputs and tags of tokens ``first`` .. ``last`` - 1 to their pool rows; few of many are kept."""
    for start in range(first, last, SCAN):
        token = start + tl.arange(0, SCAN)
        is_kept = tl.load(write_rows + token, mask=token < last, other=SINK_ROW) > SINK_ROW
        low, high = tl.min(tl.where(is_kept, token, last), axis=0), tl.max(tl.where(is_kept, token, -1), axis=0)
        for kept in range(low, high + 1, BLOCK_T):
            row, tag, value = tokens_to_keep(
                x, write_rows, write_tags, kept + tl.arange(0, BLOCK_T), high + 1, channel, x_stride, is_first,
                rows.dtype.element_ty, CHANNELS,
            )  # fmt: skip
            put_tokens(rows, row_tags, row, tag, value, channel, is_first, CHANNELS)
