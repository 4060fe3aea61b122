"""What a program of a short convolution or shift does: for a batch row, or for tokens that have all their inputs in the step.

One launch, although a step reads ring rows (history, sources of entries, rows to be stored) that its tokens overwrite, and
programs run in any order. Written are rings and the snapshots of entries; the latter are read by later launches only. A ring belongs
to one batch row, and in each block of channels one program alone writes to it. That program reads all it needs and waits for its
threads, then stores what the row resumes from and waits, then writes the tokens, late ones in place of stored rows. Nothing else
reads a row that it writes: tokens behind a row's first K - 1 have all their inputs in the step, and an entry's source in the pool
is either in a batch row's history, whose program copies it, or not written in this launch (``ConvIndex``: it is zero, in a
published snapshot, or in the ring of a row without tokens), and copied by some program. Rows that resume from one snapshot
may both copy a source, the same bits to the same place.

A program that works on a batch row knows it by its number. So it asks for all addresses at once, then for all rows.

What becomes of an output is up to the kernel. Its ``ASK(token, there, channel, is_channel, *asking)`` gives a tuple of what is loaded
for a token while inputs are, its residual first with HAS_RESIDUAL; ``PUT(y, asked, token, there, channel, is_channel, *putting)``
stores outputs ``y``, which are fp32. Knows no norm and no page.
"""

import triton
import triton.language as tl

from samebit.kernels.triton.conv_rows import (
    SINK_ROW,
    copy_entries,
    dest_rows,
    pool_inputs,
    put_later_tokens,
    put_tokens,
    step_inputs,
    tokens_to_keep,
)


@triton.jit
def no_tensors():
    """An empty tuple, to which others are added; a function, since a type checker would hold a variable to its length."""
    return ()


@triton.jit
def load_taps(taps, channel, TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr):
    """A tuple of the TAPS weights of each channel, in fp32; empty for the shift."""
    weights = no_tensors()
    if not IS_SHIFT:
        for tap in tl.static_range(TAPS):
            weight = tl.load(taps + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
            weights += (weight.to(tl.float32),)
    return weights


@triton.jit
def output(
    window, weights, asked, FIRST: tl.constexpr, TAPS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """The output whose inputs are the TAPS tensors of the tuple ``window`` from FIRST on, oldest first; in fp32."""
    if IS_SHIFT:
        y = window[FIRST + TAPS - 2].to(tl.float32)
    else:
        y = tl.zeros(window[FIRST].shape, dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            y = y + weights[tap] * window[FIRST + tap].to(tl.float32)
        y = y + window[FIRST + TAPS - 1].to(tl.float32)
        if HAS_RESIDUAL:
            y = y + asked[0]
    return y


@triton.jit
def places(token, query_start, num_rows, TAPS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Which of ``token`` [N] are padding, and which have all their inputs in the step."""
    end, start = tl.load(query_start + num_rows), tl.zeros_like(token)
    for first in range(0, num_rows, ROW_BLOCK):
        row = first + tl.arange(0, ROW_BLOCK)
        place = tl.load(query_start + row, mask=row < num_rows, other=0)[None, :]
        start = tl.maximum(start, tl.max(tl.where(place <= token[:, None], place, 0), axis=1))
    return token >= end, token - start >= TAPS - 1


@triton.jit
def convolve_later_tokens(
    x, taps, query_start, first_token, channel, asking, putting, num_tokens, num_rows, x_stride,
    ASK: tl.constexpr, PUT: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_T: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of those of BLOCK_T tokens that have all their inputs in the step, and zeros for padding.

    ``channel`` is [1, C], or of any two dimensions for one token.
    """
    token = first_token + tl.arange(0, BLOCK_T)
    column, is_channel, there = token[:, None], channel < CHANNELS, (token < num_tokens)[:, None]
    # What is loaded does not wait for the rows' places: of tokens of other rows, or padding, nothing is stored.
    weights = load_taps(taps, channel, TAPS, CHANNELS, IS_SHIFT)
    window = no_tensors()
    for tap in tl.static_range(TAPS):
        source = column + (tap - TAPS + 1)
        window += (step_inputs(x, source, channel, there & (source >= 0) & is_channel, x_stride, KEPT),)
    asked = ASK(column, there, channel, is_channel, *asking)
    is_padding, is_later = places(token, query_start, num_rows, TAPS, ROW_BLOCK)
    y = tl.where(is_padding[:, None], 0.0, output(window, weights, asked, 0, TAPS, IS_SHIFT, HAS_RESIDUAL))
    PUT(y, asked, column, there & (is_padding | is_later)[:, None], channel, is_channel, *putting)


@triton.jit
def convolve_row(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, row, channel, tile, in_tile, asking, putting, num_rows,
    num_entries, x_stride, is_first,
    ASK: tl.constexpr, PUT: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_WIDE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    SCAN: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of the first tokens of a batch row, and all that is written to its ring; entries that it copies.

    ``channel`` [1, C] are the program's; ``tile``, of any two dimensions, are the same where ``in_tile``, as outputs are to lie.
    """
    HISTORY: tl.constexpr = TAPS - 1
    KEPT: tl.constexpr = rows.dtype.element_ty
    num_dests = num_entries * HISTORY
    # Everything is asked for before anything is waited for.
    first, last = tl.load(query_start + row), tl.load(query_start + row + 1)
    dest = dest_rows(entry_dest, 0, num_dests, SCAN)
    sources, expected, stored, tags = no_tensors(), no_tensors(), no_tensors(), no_tensors()
    for h in tl.static_range(HISTORY):
        at = row * HISTORY + h
        sources += (tl.load(read_rows + at),)
        stored += (tl.load(store_rows + at),)
        expected += (tl.load(read_tags + at, mask=is_first, other=0),)
        tags += (tl.load(store_tags + at, mask=is_first, other=0),)
    weights = load_taps(taps, tile, TAPS, CHANNELS, IS_SHIFT)
    if IS_WIDE:
        # Taps are most of what one program then loads, and are asked for while addresses are waited for: nothing moves across this.
        tl.debug_barrier()
    window, found = no_tensors(), no_tensors()
    for h in tl.static_range(HISTORY):
        wanted = (first < last) | (stored[h] > SINK_ROW)
        window += (pool_inputs(rows, sources[h], tile, in_tile & wanted, CHANNELS),)
        found += (tl.load(row_tags + sources[h], mask=is_first & (stored[h] > SINK_ROW), other=0),)
    asked = no_tensors()
    for h in tl.static_range(HISTORY):
        is_token = first + h < last
        window += (step_inputs(x, first + h, tile, in_tile & is_token, x_stride, KEPT),)
        asked += (ASK(first + h, is_token, tile, in_tile, *asking),)
    token = first + tl.arange(0, BLOCK_K)
    kept, tag, value = tokens_to_keep(
        x, write_rows, write_tags, token, last, channel, x_stride, is_first, KEPT, CHANNELS
    )
    for h in tl.static_range(HISTORY):
        if first + h < last:
            y = output(window, weights, asked[h], h, TAPS, IS_SHIFT, HAS_RESIDUAL)
            there = tl.full((), True, tl.int1)
            PUT(y, asked[h], first + h, there, tile, in_tile, *putting)
    for start in range(SCAN, num_dests, SCAN):
        dest = tl.maximum(dest, dest_rows(entry_dest, start, num_dests, SCAN))
    if tl.max(dest, axis=0) > SINK_ROW:
        copy_entries(
            x, rows, row_tags, read_rows, entry_sources, entry_source_tags, entry_dest, entry_tag, row, channel,
            num_rows, num_entries, x_stride, is_first, HISTORY, CHANNELS, BLOCK_H, SCAN, ROW_BLOCK,
        )  # fmt: skip
    # All that this launch reads of the ring has been read.
    tl.debug_barrier()
    for h in tl.static_range(HISTORY):
        at = rows + stored[h].to(tl.int64) * CHANNELS + tile
        tl.store(at, window[h], mask=in_tile & (stored[h] > SINK_ROW))
        tl.store(row_tags + stored[h], tags[h] ^ found[h] ^ expected[h], mask=is_first & (stored[h] > SINK_ROW))
    # Late tokens take the place of rows that were stored.
    tl.debug_barrier()
    put_tokens(rows, row_tags, kept, tag, value, channel, is_first, CHANNELS)
    put_later_tokens(
        x, rows, row_tags, write_rows, write_tags, first + BLOCK_K, last, channel, x_stride, is_first, CHANNELS,
        BLOCK_K, SCAN,
    )  # fmt: skip
