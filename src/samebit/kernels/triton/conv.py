"""Short convolution and shift on a device, and the pool rows in which their inputs are kept. Knows no model.

One launch, although a step reads ring rows (history, sources of entries, rows to be stored) that its tokens overwrite, and
programs run in any order. Written are rings and the snapshots of entries; the latter are read by later launches only. A ring belongs
to one batch row, and in each block of channels one program alone writes to it. That program reads all it needs and waits for its
threads, then stores what the row resumes from and waits, then writes the tokens, late ones in place of stored rows. Nothing else
reads a row that it writes: tokens behind a row's first K - 1 have all their inputs in the step, and an entry's source in the pool
is either in a batch row's history, whose program copies it, or not written in this launch (``ConvIndex``: it is zero, in a
published snapshot, or in the ring of a row without tokens), and copied by some program. Rows that resume from one snapshot
may both copy a source, the same bits to the same place.

A program that works on a batch row knows it by its number. So it asks for all addresses at once, then for all rows.
Tiles are a plain function of static sizes; each output is one program's sum, in the same order whatever the tile.

A norm of the outputs needs all channels of a token. Where few programs run, each has them all, and norms what it stores. The bits
are those of the norm by itself (``rows``), for which a row must lie over threads as it does there: Triton decides that
from a tile's shape, its warps, and the widest loads and stores of such tiles. Shape and warps are that kernel's, and where channels
come in whole vectors so are the widest loads and stores, as nothing has smaller elements than what the norm gives. The code that
norms is the same function.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from samebit.kernels.triton.index import ROW_BLOCK
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.rows import norm_tile, normed, rms_norm

SCAN = 512
"""Tokens or sources of entries that are searched at once for what is to be kept."""
# Parts of buffers that differ from bucket to bucket: where they lie and how many there are compiles nothing anew.
_INDEX = [
    "row_tags", "query_start", "read_rows", "read_tags", "store_rows", "store_tags", "write_rows", "write_tags",
    "entry_sources", "entry_source_tags", "entry_dest", "entry_tag", "num_tokens", "num_rows", "num_entries",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Channels and tokens of a program, and how it is compiled: its warps, and the most registers of a thread."""

    channels: int
    tokens: int
    num_warps: int
    registers: int


FEW, MANY = Tile(256, 4, 4, 64), Tile(256, 8, 4, 96)
"""For steps of few tokens a row, and for others. A Hopper multiprocessor holds 8 programs of the first, so 132 hold 128 rows of 2048
channels at once. With fewer registers to a thread, either spills some."""
NORMED_WARPS = 1056
"""Warps that run at once on a Hopper device whose threads all have 255 registers: 8 on each of 132 multiprocessors."""
NORMED_CHANNELS = 4096
"""More do not fit into the registers of a program."""
VECTOR = 8
"""Elements that a thread loads or stores at once, at most."""


def tile_of(num_tokens: int, num_rows: int, channels: int) -> Tile:
    """The tile of a step of so many tokens and batch rows; narrower where there are few channels."""
    tile = FEW if num_tokens <= FEW.tokens * num_rows else MANY
    return replace(tile, channels=min(tile.channels, triton.next_power_of_2(channels)))


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm of outputs: its gain [C] and epsilon, and the dtype of what it gives."""

    gain: Tensor
    eps: float
    dtype: torch.dtype


def normed_tile(channels: int) -> Tile:
    """The tile of a convolution with a norm, which is the norm's own."""
    block, tokens, num_warps = norm_tile(channels)
    return Tile(block, tokens, num_warps, 255)


def is_normed_at_once(num_tokens: int, num_rows: int, channels: int) -> bool:
    """Whether a norm is in the launch of its convolution: where channels allow it, and all programs run at once."""
    if channels % VECTOR or channels > NORMED_CHANNELS:
        return False
    tile = normed_tile(channels)
    num_programs: int = num_rows + triton.cdiv(num_tokens, tile.tokens)
    return num_programs * tile.num_warps <= NORMED_WARPS


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
def load_residual(residual, token, channel, wanted, stride, HAS_RESIDUAL: tl.constexpr):
    """A tuple of what is added to the outputs of ``token``, in fp32; empty without a residual."""
    found = no_tensors()
    if HAS_RESIDUAL:
        at = residual + token.to(tl.int64) * stride + channel
        found = (tl.load(at, mask=wanted, other=0.0).to(tl.float32),)
    return found


@triton.jit
def load_gains(gain, channel, CHANNELS: tl.constexpr, HAS_NORM: tl.constexpr):
    """A tuple of the gain of each channel; empty without a norm."""
    gains = no_tensors()
    if HAS_NORM:
        gains = (tl.load(gain + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32),)
    return gains


@triton.jit
def output(
    window, weights, extra, FIRST: tl.constexpr, TAPS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr
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
            y = y + extra[0]
    return y


@triton.jit
def put_outputs(y, gains, out, normed_out, token, channel, wanted, eps, CHANNELS: tl.constexpr, HAS_NORM: tl.constexpr):
    """Store outputs of tokens, and what the norm makes of them: ``y`` is then a tile such as the norm by itself has."""
    at = token.to(tl.int64) * CHANNELS + channel
    tl.store(out + at, y, mask=wanted)
    if HAS_NORM:
        tl.store(normed_out + at, normed(y, gains[0], eps, CHANNELS), mask=wanted)


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
    x, taps, query_start, residual, gain, out, normed_out, first_token, channel, num_tokens, num_rows, x_stride,
    residual_stride, eps,
    KEPT: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_T: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of those of BLOCK_T tokens that have all their inputs in the step, and zeros for padding; and their norm."""
    token = first_token + tl.arange(0, BLOCK_T)
    column, is_channel, there = token[:, None], channel < CHANNELS, (token < num_tokens)[:, None]
    # What is loaded does not wait for the rows' places: of tokens of other rows, or padding, nothing is stored.
    weights = load_taps(taps, channel, TAPS, CHANNELS, IS_SHIFT)
    gains = load_gains(gain, channel, CHANNELS, HAS_NORM)
    window = no_tensors()
    for tap in tl.static_range(TAPS):
        source = column + (tap - TAPS + 1)
        window += (step_inputs(x, source, channel, there & (source >= 0) & is_channel, x_stride, KEPT),)
    extra = load_residual(residual, column, channel, there & is_channel, residual_stride, HAS_RESIDUAL)
    is_padding, is_later = places(token, query_start, num_rows, TAPS, ROW_BLOCK)
    y = tl.where(is_padding[:, None], 0.0, output(window, weights, extra, 0, TAPS, IS_SHIFT, HAS_RESIDUAL))
    wanted = there & (is_padding | is_later)[:, None] & is_channel
    put_outputs(y, gains, out, normed_out, column, channel, wanted, eps, CHANNELS, HAS_NORM)


@triton.jit
def convolve_row(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, residual, gain, out, normed_out, row, channel, num_rows,
    num_entries, x_stride, residual_stride, eps, is_first,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    SCAN: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of the first tokens of a batch row, their norm, and all that is written to its ring; entries that it copies."""
    HISTORY: tl.constexpr = TAPS - 1
    KEPT: tl.constexpr = rows.dtype.element_ty
    # With a norm, the tile has the norm's shape, and a token its first row: loads of the others are masked.
    TILE_ROWS: tl.constexpr = BLOCK_T if HAS_NORM else 1
    channels = tl.broadcast_to(channel, (TILE_ROWS, BLOCK_C))
    is_channel = (tl.arange(0, TILE_ROWS) == 0)[:, None] & (channel < CHANNELS)
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
    weights = load_taps(taps, channels, TAPS, CHANNELS, IS_SHIFT)
    gains = load_gains(gain, channels, CHANNELS, HAS_NORM)
    if HAS_NORM:
        # Taps are most of what one program then loads, and are asked for while addresses are waited for: nothing moves across this.
        tl.debug_barrier()
    window, found = no_tensors(), no_tensors()
    for h in tl.static_range(HISTORY):
        wanted = (first < last) | (stored[h] > SINK_ROW)
        window += (pool_inputs(rows, sources[h], channels, is_channel & wanted, CHANNELS),)
        found += (tl.load(row_tags + sources[h], mask=is_first & (stored[h] > SINK_ROW), other=0),)
    extras = no_tensors()
    for h in tl.static_range(HISTORY):
        wanted = is_channel & (first + h < last)
        window += (step_inputs(x, first + h, channels, wanted, x_stride, KEPT),)
        extras += (load_residual(residual, first + h, channels, wanted, residual_stride, HAS_RESIDUAL),)
    token = first + tl.arange(0, BLOCK_K)
    kept, tag, value = tokens_to_keep(
        x, write_rows, write_tags, token, last, channel, x_stride, is_first, KEPT, CHANNELS
    )
    for h in tl.static_range(HISTORY):
        if first + h < last:
            y = output(window, weights, extras[h], h, TAPS, IS_SHIFT, HAS_RESIDUAL)
            put_outputs(y, gains, out, normed_out, first + h, channels, is_channel, eps, CHANNELS, HAS_NORM)
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
        at = rows + stored[h].to(tl.int64) * CHANNELS + channels
        tl.store(at, window[h], mask=is_channel & (stored[h] > SINK_ROW))
        tl.store(row_tags + stored[h], tags[h] ^ found[h] ^ expected[h], mask=is_first & (stored[h] > SINK_ROW))
    # Late tokens take the place of rows that were stored.
    tl.debug_barrier()
    put_tokens(rows, row_tags, kept, tag, value, channel, is_first, CHANNELS)
    put_later_tokens(
        x, rows, row_tags, write_rows, write_tags, first + BLOCK_K, last, channel, x_stride, is_first, CHANNELS,
        BLOCK_K, SCAN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_INDEX)
def convolve_kernel(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, residual, gain, out, normed_out, num_tokens, num_rows,
    num_entries, x_stride, residual_stride, eps,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_SPARSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    SCAN: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each batch row, then one for each BLOCK_T tokens, most of which find nothing to do if IS_SPARSE."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    if program < num_rows:
        convolve_row(
            x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag, residual, gain, out, normed_out, program, channel,
            num_rows, num_entries, x_stride, residual_stride, eps, tl.program_id(1) == 0,
            TAPS, CHANNELS, IS_SHIFT, HAS_RESIDUAL, HAS_NORM, BLOCK_T, BLOCK_C, BLOCK_K, BLOCK_H, SCAN, ROW_BLOCK,
        )  # fmt: skip
    else:
        first_token, has_work = (program - num_rows) * BLOCK_T, True
        if IS_SPARSE:
            token = first_token + tl.arange(0, BLOCK_T)
            is_padding, is_later = places(token, query_start, num_rows, TAPS, ROW_BLOCK)
            has_work = tl.max(((is_padding | is_later) & (token < num_tokens)).to(tl.int32), axis=0) > 0
        if has_work:
            convolve_later_tokens(
                x, taps, query_start, residual, gain, out, normed_out, first_token, channel, num_tokens,
                num_rows, x_stride, residual_stride, eps,
                rows.dtype.element_ty, TAPS, CHANNELS, IS_SHIFT, HAS_RESIDUAL, HAS_NORM, BLOCK_T, ROW_BLOCK,
            )  # fmt: skip


def _run(
    x: Tensor, taps: Tensor | None, rows: Tensor, row_tags: Tensor, residual: Tensor | None, norm: Norm | None,
    *index: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The launch, and its outputs and their norm; ``index`` is a ConvIndex of at least one batch row.

    Without taps, the shift; without a norm, the second result is the first.
    """
    read_rows, entry_tag = index[1], index[-1]
    assert x.stride(1) == 1, x.stride()
    assert rows.is_contiguous(), rows.stride()
    (tokens, channels), (num_rows, history) = x.shape, read_rows.shape
    out = torch.empty_like(
        x, dtype=rows.dtype if residual is None else torch.float32, memory_format=torch.contiguous_format
    )
    normed_out = out if norm is None else torch.empty_like(out, dtype=norm.dtype)
    extra = x if residual is None else residual
    assert extra.stride(1) == 1, extra.stride()
    tile = tile_of(tokens, num_rows, channels) if norm is None else normed_tile(channels)
    launch(
        convolve_kernel,
        (num_rows + triton.cdiv(tokens, tile.tokens), triton.cdiv(channels, tile.channels)),
        x, x if taps is None else taps, rows, row_tags, *index, extra, out if norm is None else norm.gain, out,
        normed_out, tokens, num_rows, entry_tag.shape[0], x.stride(0), extra.stride(0), 0.0 if norm is None else norm.eps,
        TAPS=history + 1, CHANNELS=channels, IS_SHIFT=taps is None, HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None, IS_SPARSE=tokens <= history * num_rows, BLOCK_T=tile.tokens, BLOCK_C=tile.channels,
        BLOCK_K=max(tile.tokens, FEW.tokens), BLOCK_H=triton.next_power_of_2(history), SCAN=SCAN, ROW_BLOCK=ROW_BLOCK,
        num_warps=tile.num_warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out, normed_out


def short_conv(
    x: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor, read_tags: Tensor,
    store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor, entry_sources: Tensor,
    entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, residual: Tensor | None, threads: int,
) -> Tensor:  # fmt: skip
    """As ``torch_set.short_conv``, on ``x`` [T, C] as ``rows`` hold it; fp32 with a residual, else like ``rows``."""
    return _run(
        x, taps, rows, row_tags, residual, None, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
        write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag,
    )[0]  # fmt: skip


def short_conv_norm(
    activation: torch.dtype, x: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor,
    read_rows: Tensor, read_tags: Tensor, store_rows: Tensor, store_tags: Tensor, write_rows: Tensor,
    write_tags: Tensor, entry_sources: Tensor, entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor,
    residual: Tensor, gain: Tensor, eps: float, threads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``short_conv`` in fp32, and ``rows.rms_norm`` of it, in one launch if ``is_normed_at_once``.

    Operands are fp32 or of the activation dtype.
    """
    operands = (x, taps, rows, residual, gain)
    assert all(operand.dtype in (torch.float32, activation) for operand in operands), [o.dtype for o in operands]
    norm = Norm(gain, eps, activation) if is_normed_at_once(x.shape[0], read_rows.shape[0], x.shape[1]) else None
    y, normed_y = _run(
        x, taps, rows, row_tags, residual, norm, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
        write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip
    return y, rms_norm(activation, y, gain, eps, threads) if norm is None else normed_y


def shift(
    x: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor, read_tags: Tensor,
    store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor, entry_sources: Tensor,
    entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, threads: int,
) -> Tensor:  # fmt: skip
    """y[t] = x[t - 1] in the dtype of ``rows``."""
    return _run(
        x, None, rows, row_tags, None, None, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
        write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag,
    )[0]  # fmt: skip


def implementations(activation: torch.dtype) -> dict[str, Callable[..., Any]]:
    """These kernels for activations of this dtype, with the arguments of the operators."""
    return {"short_conv": short_conv, "short_conv_norm": partial(short_conv_norm, activation), "shift": shift}
