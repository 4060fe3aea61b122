"""Short convolution and shift on a device, and the pool rows in which their inputs are kept. Knows no model.

Two launches. A step reads ring rows (history, sources of entries, rows to be stored) that its tokens overwrite, and
rows of snapshots beside those that entries write; programs of one launch run in any order. So the first launch only
reads the pool, and holds in scratch what is to be copied within it; the second only writes. An entry has its snapshot
and a batch row its ring to itself, so two writes meet in one case: late tokens of a batch row take the place of rows
that it stores, and stay.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels import values
from samebit.kernels.triton.index import ROW_BLOCK, batch_rows
from samebit.kernels.triton.launch import launch

SINK_ROW = tl.constexpr(values.SINK_ROW)
BLOCK_T, BLOCK_C, OWNERS, SCAN = 8, 256, 8, 256
"""Tokens and channels of a program; batch rows or entries of one, of which most steps have nothing to copy; tokens that are searched
at once for one that takes a stored row's place.
"""
# Parts of buffers that differ from bucket to bucket: where they lie and how many there are compiles nothing anew.
_INDEX = [
    "row_tags", "query_start", "read_rows", "read_tags", "store_rows", "store_tags", "write_rows", "write_tags",
    "entry_sources", "entry_source_tags", "entry_dest", "entry_tag", "held_tags", "num_tokens", "num_rows",
    "num_entries",
]  # fmt: skip


@triton.jit
def step_inputs(x, token, channel, wanted, x_stride, KEPT: tl.constexpr):
    """Inputs [N, BLOCK_C] of ``token`` [N, 1] as the pool keeps them."""
    return tl.load(x + token.to(tl.int64) * x_stride + channel, mask=wanted, other=0.0).to(KEPT)


@triton.jit
def pool_inputs(rows, row, channel, wanted, CHANNELS: tl.constexpr):
    """Pool rows ``row`` [N, 1], [N, BLOCK_C]."""
    return tl.load(rows + row.to(tl.int64) * CHANNELS + channel, mask=wanted, other=0.0)


@triton.jit
def inputs_before(
    x, rows, read_rows, token, ahead, row, live, channel, x_stride,
    BACK: tl.constexpr, HISTORY: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The inputs BACK places before ``token`` [BLOCK_T], ``ahead`` of the first of its batch ``row``, in fp32."""
    in_step, is_channel = live & (ahead >= BACK), channel < CHANNELS
    before = live & (ahead < BACK)
    source = tl.load(read_rows + row * HISTORY + (HISTORY + ahead - BACK), mask=before, other=0)
    kept = pool_inputs(rows, source[:, None], channel, before[:, None] & is_channel, CHANNELS).to(tl.float32)
    wanted = in_step[:, None] & is_channel
    own = step_inputs(x, token[:, None] - BACK, channel, wanted, x_stride, rows.dtype.element_ty).to(tl.float32)
    return tl.where(in_step[:, None], own, kept)


@triton.jit
def convolve(
    x, taps, rows, query_start, read_rows, residual, out, first_token, channel, num_tokens, num_rows, x_stride,
    residual_stride,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens, zeros for padding."""
    token = first_token + tl.arange(0, BLOCK_T)
    there, is_channel = (token < num_tokens)[:, None], channel < CHANNELS
    row = batch_rows(token, query_start, num_rows, ROW_BLOCK)
    live = (token < num_tokens) & (row < num_rows)
    ahead = token - tl.load(query_start + row, mask=live, other=0)
    if IS_SHIFT:
        y = inputs_before(x, rows, read_rows, token, ahead, row, live, channel, x_stride, 1, TAPS - 1, CHANNELS)
    else:
        y = tl.zeros((BLOCK_T, channel.shape[1]), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            value = inputs_before(
                x, rows, read_rows, token, ahead, row, live, channel, x_stride, TAPS - 1 - tap, TAPS - 1, CHANNELS
            )
            weight = tl.load(taps + tap * CHANNELS + channel, mask=is_channel, other=0.0).to(tl.float32)
            y = y + weight * value
        y = y + inputs_before(x, rows, read_rows, token, ahead, row, live, channel, x_stride, 0, TAPS - 1, CHANNELS)
        if HAS_RESIDUAL:
            at = residual + token.to(tl.int64)[:, None] * residual_stride + channel
            y = y + tl.load(at, mask=live[:, None] & is_channel, other=0.0).to(tl.float32)
    tl.store(
        out + token.to(tl.int64)[:, None] * CHANNELS + channel, tl.where(live[:, None], y, 0.0), mask=there & is_channel
    )


@triton.jit
def any_wanted(dest, first, last, HISTORY: tl.constexpr, OWNERS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Whether any of the owners ``first`` .. ``last`` - 1, at most OWNERS, has a destination beyond the sink."""
    place = tl.arange(0, OWNERS * BLOCK_H)
    row = tl.load(dest + first * HISTORY + place, mask=place < (last - first) * HISTORY, other=SINK_ROW)
    return tl.max(row, axis=0) > SINK_ROW


@triton.jit
def hold(
    x, rows, row_tags, held, held_tags, source, dest, expected, tag, held_row, channel, x_stride, CHANNELS: tl.constexpr
):
    """Hold what pool rows ``dest`` [N] are to get: of tokens ``source`` >= 0, or of pool rows -(source + 1)."""
    wanted, is_channel, from_pool = dest > SINK_ROW, channel < CHANNELS, source < 0
    pool_row = tl.where(from_pool, -(source + 1), 0)
    own_wanted, kept_wanted = (wanted & ~from_pool)[:, None] & is_channel, (wanted & from_pool)[:, None] & is_channel
    own = step_inputs(x, source[:, None], channel, own_wanted, x_stride, rows.dtype.element_ty)
    kept = pool_inputs(rows, pool_row[:, None], channel, kept_wanted, CHANNELS)
    at = held + held_row.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(at, own, mask=own_wanted)
    tl.store(at, kept, mask=kept_wanted)
    if tl.program_id(1) == 0:
        # A stale source spoils the copy's tag.
        stale = tl.load(row_tags + pool_row, mask=wanted & from_pool, other=0) ^ expected
        tl.store(held_tags + held_row, tag ^ tl.where(from_pool, stale, 0), mask=wanted)


@triton.jit(do_not_specialize=_INDEX)
def read_kernel(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, residual, out, held, held_tags,
    num_tokens, num_rows, num_entries, x_stride, residual_stride,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, OWNERS: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs, and what is to be copied within the pool, with its new tags: a program for some batch rows or entries."""
    HISTORY: tl.constexpr = TAPS - 1
    row_programs = tl.cdiv(num_rows, OWNERS)
    program = tl.program_id(0) - tl.cdiv(num_tokens, BLOCK_T)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    h = tl.arange(0, BLOCK_H)
    is_place = h < HISTORY
    if program < 0:
        convolve(
            x, taps, rows, query_start, read_rows, residual, out, tl.program_id(0) * BLOCK_T, channel, num_tokens,
            num_rows, x_stride, residual_stride, TAPS, CHANNELS, IS_SHIFT, HAS_RESIDUAL, BLOCK_T, ROW_BLOCK,
        )  # fmt: skip
    elif program < row_programs:
        first, last = program * OWNERS, tl.minimum((program + 1) * OWNERS, num_rows)
        if any_wanted(store_rows, first, last, HISTORY, OWNERS, BLOCK_H):
            for row in range(first, last):
                at = row * HISTORY + h
                store_dest = tl.load(store_rows + at, mask=is_place, other=SINK_ROW)
                read_row = tl.load(read_rows + at, mask=is_place, other=0)
                read_tag = tl.load(read_tags + at, mask=is_place, other=0)
                store_tag = tl.load(store_tags + at, mask=is_place, other=0)
                hold(
                    x, rows, row_tags, held, held_tags, -(read_row + 1), store_dest, read_tag, store_tag, at, channel,
                    x_stride, CHANNELS,
                )  # fmt: skip
    else:
        first = (program - row_programs) * OWNERS
        last = tl.minimum(first + OWNERS, num_entries)
        if any_wanted(entry_dest, first, last, HISTORY, OWNERS, BLOCK_H):
            for entry in range(first, last):
                at = entry * HISTORY + h
                dest = tl.load(entry_dest + at, mask=is_place, other=SINK_ROW)
                source = tl.load(entry_sources + at, mask=is_place, other=0)
                source_tag = tl.load(entry_source_tags + at, mask=is_place, other=0)
                tag = tl.load(entry_tag + entry)
                hold(
                    x, rows, row_tags, held, held_tags, source, dest, source_tag, tag, num_rows * HISTORY + at, channel,
                    x_stride, CHANNELS,
                )  # fmt: skip


@triton.jit
def put_held(rows, row_tags, held, held_tags, held_row, dest, channel, CHANNELS: tl.constexpr):
    """Copy scratch rows ``held_row`` [N] and their tags to pool rows ``dest`` [N], but for those up to the sink."""
    wanted, is_channel = dest > SINK_ROW, channel < CHANNELS
    value = pool_inputs(held, held_row[:, None], channel, wanted[:, None] & is_channel, CHANNELS)
    at = rows + dest.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(at, value, mask=wanted[:, None] & is_channel)
    if tl.program_id(1) == 0:
        tl.store(row_tags + dest, tl.load(held_tags + held_row, mask=wanted, other=0), mask=wanted)


@triton.jit(do_not_specialize=_INDEX)
def write_kernel(
    x, rows, row_tags, query_start, store_rows, write_rows, write_tags, entry_dest, held, held_tags,
    num_tokens, num_rows, num_entries, x_stride,
    HISTORY: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, OWNERS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The step's inputs, and what was held, to their pool rows."""
    row_programs = tl.cdiv(num_rows, OWNERS)
    program = tl.program_id(0) - tl.cdiv(num_tokens, BLOCK_T)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    h = tl.arange(0, BLOCK_H)
    is_place = h < HISTORY
    if program < 0:
        token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = (token < num_tokens) & (token < tl.load(query_start + num_rows))
        write_row = tl.load(write_rows + token, mask=live, other=SINK_ROW)
        wanted = (write_row > SINK_ROW)[:, None] & (channel < CHANNELS)
        value = step_inputs(x, token[:, None], channel, wanted, x_stride, rows.dtype.element_ty)
        tl.store(rows + write_row.to(tl.int64)[:, None] * CHANNELS + channel, value, mask=wanted)
        if tl.program_id(1) == 0:
            token_tag = tl.load(write_tags + token, mask=live, other=0)
            tl.store(row_tags + write_row, token_tag, mask=write_row > SINK_ROW)
    elif program < row_programs:
        first, last = program * OWNERS, tl.minimum((program + 1) * OWNERS, num_rows)
        if any_wanted(store_rows, first, last, HISTORY, OWNERS, BLOCK_H):
            for row in range(first, last):
                at = row * HISTORY + h
                store_dest = tl.load(store_rows + at, mask=is_place, other=SINK_ROW)
                begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
                stores = tl.max(store_dest, axis=0) > SINK_ROW
                taken = tl.zeros_like(store_dest)
                for start in range(begin, tl.where(stores, end, begin), SCAN):
                    later = start + tl.arange(0, SCAN)
                    later_row = tl.load(write_rows + later, mask=later < end, other=0)
                    taken += tl.sum((later_row[None, :] == store_dest[:, None]).to(tl.int32), axis=1)
                left = tl.where(taken == 0, store_dest, SINK_ROW)
                put_held(rows, row_tags, held, held_tags, at, left, channel, CHANNELS)
    else:
        first = (program - row_programs) * OWNERS
        last = tl.minimum(first + OWNERS, num_entries)
        if any_wanted(entry_dest, first, last, HISTORY, OWNERS, BLOCK_H):
            for entry in range(first, last):
                at = entry * HISTORY + h
                dest = tl.load(entry_dest + at, mask=is_place, other=SINK_ROW)
                put_held(rows, row_tags, held, held_tags, num_rows * HISTORY + at, dest, channel, CHANNELS)


def _run(
    x: Tensor, taps: Tensor | None, rows: Tensor, row_tags: Tensor, residual: Tensor | None, *index: Tensor
) -> Tensor:
    """Both launches; ``index`` is a ConvIndex. Without taps, the shift."""
    (
        query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags, entry_sources,
        entry_source_tags, entry_dest, entry_tag,
    ) = index  # fmt: skip
    assert x.stride(1) == 1, x.stride()
    assert rows.is_contiguous(), rows.stride()
    (tokens, channels), (num_rows, history), num_entries = x.shape, read_rows.shape, entry_tag.shape[0]
    held = torch.empty(((num_rows + num_entries) * history, channels), dtype=rows.dtype, device=x.device)
    held_tags = torch.empty(held.shape[0], dtype=torch.int64, device=x.device)
    out = torch.empty_like(
        x, dtype=rows.dtype if residual is None else torch.float32, memory_format=torch.contiguous_format
    )
    extra = x if residual is None else residual
    assert extra.stride(1) == 1, extra.stride()
    block_c = min(BLOCK_C, triton.next_power_of_2(channels))
    owner_programs = triton.cdiv(num_rows, OWNERS) + triton.cdiv(num_entries, OWNERS)
    grid = (triton.cdiv(tokens, BLOCK_T) + owner_programs, triton.cdiv(channels, block_c))
    shape: dict[str, Any] = {"CHANNELS": channels, "BLOCK_T": BLOCK_T, "BLOCK_C": block_c, "OWNERS": OWNERS}
    shape["BLOCK_H"] = triton.next_power_of_2(history)
    launch(
        read_kernel,
        grid,
        x, x if taps is None else taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags,
        entry_sources, entry_source_tags, entry_dest, entry_tag, extra, out, held, held_tags, tokens, num_rows,
        num_entries, x.stride(0), extra.stride(0),
        TAPS=history + 1, IS_SHIFT=taps is None, HAS_RESIDUAL=residual is not None, ROW_BLOCK=ROW_BLOCK, **shape,
        enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        write_kernel,
        grid,
        x, rows, row_tags, query_start, store_rows, write_rows, write_tags, entry_dest, held, held_tags, tokens,
        num_rows, num_entries, x.stride(0),
        HISTORY=history, SCAN=SCAN, **shape,
    )  # fmt: skip
    return out


def short_conv(
    x: Tensor,
    taps: Tensor,
    rows: Tensor,
    row_tags: Tensor,
    query_start: Tensor,
    read_rows: Tensor,
    read_tags: Tensor,
    store_rows: Tensor,
    store_tags: Tensor,
    write_rows: Tensor,
    write_tags: Tensor,
    entry_sources: Tensor,
    entry_source_tags: Tensor,
    entry_dest: Tensor,
    entry_tag: Tensor,
    residual: Tensor | None,
    threads: int,
) -> Tensor:
    """As ``torch_set.short_conv``, on ``x`` [T, C] as ``rows`` hold it; fp32 with a residual, else like ``rows``."""
    return _run(
        x, taps, rows, row_tags, residual, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
        write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip


def shift(
    x: Tensor,
    rows: Tensor,
    row_tags: Tensor,
    query_start: Tensor,
    read_rows: Tensor,
    read_tags: Tensor,
    store_rows: Tensor,
    store_tags: Tensor,
    write_rows: Tensor,
    write_tags: Tensor,
    entry_sources: Tensor,
    entry_source_tags: Tensor,
    entry_dest: Tensor,
    entry_tag: Tensor,
    threads: int,
) -> Tensor:
    """y[t] = x[t - 1] in the dtype of ``rows``."""
    return _run(
        x, None, rows, row_tags, None, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
        write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip
