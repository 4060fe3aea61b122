"""Short convolution and shift on a device, and the pool rows in which their inputs are kept, in one launch. Knows no model.

Tiles are a plain function of static sizes; each output is one program's sum, in the same order whatever the tile. Why programs may
run in any order is said where they are (``conv_programs``).

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

from samebit.kernels.triton.conv_programs import convolve_later_tokens, convolve_row, no_tensors, places
from samebit.kernels.triton.index import ROW_BLOCK
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.rows import norm_tile, normed, rms_norm

SCAN = 512
"""Tokens or sources of entries that are searched at once for what is to be kept."""
# Parts of buffers that differ from bucket to bucket: where they lie and how many there are compiles nothing anew.
INDEX = [
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
NORMED_REGISTERS = 255
"""The most registers of a thread where a program norms, too: all that there are."""
NORMED_WARPS = 1056
"""Warps that run at once on a Hopper device with that many registers to a thread: 8 on each of 132 multiprocessors."""
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
    return Tile(block, tokens, num_warps, NORMED_REGISTERS)


def is_normed_at_once(num_tokens: int, num_rows: int, channels: int) -> bool:
    """Whether a norm is in the launch of its convolution: where channels allow it, and all programs run at once."""
    if channels % VECTOR or channels > NORMED_CHANNELS:
        return False
    tile = normed_tile(channels)
    num_programs: int = num_rows + triton.cdiv(num_tokens, tile.tokens)
    return num_programs * tile.num_warps <= NORMED_WARPS


@triton.jit
def load_residual(token, there, channel, is_channel, residual, stride, HAS_RESIDUAL: tl.constexpr):
    """A tuple of what is added to the outputs of ``token``, in fp32; empty without a residual."""
    found = no_tensors()
    if HAS_RESIDUAL:
        at = residual + token.to(tl.int64) * stride + channel
        found = (tl.load(at, mask=there & is_channel, other=0.0).to(tl.float32),)
    return found


@triton.jit
def load_gains(gain, channel, CHANNELS: tl.constexpr, HAS_NORM: tl.constexpr):
    """A tuple of the gain of each channel; empty without a norm."""
    gains = no_tensors()
    if HAS_NORM:
        gains = (tl.load(gain + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32),)
    return gains


@triton.jit
def put_outputs(
    y, asked, token, there, channel, is_channel, out, normed_out, gains, eps, CHANNELS: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Store outputs of tokens, and what the norm makes of them: ``y`` is then a tile such as the norm by itself has."""
    at, wanted = token.to(tl.int64) * CHANNELS + channel, there & is_channel
    tl.store(out + at, y, mask=wanted)
    if HAS_NORM:
        tl.store(normed_out + at, normed(y, gains[0], eps, CHANNELS), mask=wanted)


@triton.jit(do_not_specialize=INDEX)
def convolve_kernel(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, residual, gain, out, normed_out, num_tokens, num_rows,
    num_entries, x_stride, residual_stride, eps,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, IS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_SPARSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    SCAN: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each batch row, then one for each BLOCK_T tokens, most of which find nothing to do if IS_SPARSE.

    The first BLOCK_K tokens of a batch row are kept at once.
    """
    program = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    # With a norm, the tile has the norm's shape, and a row's token is its first row: loads of the others are masked.
    TILE_ROWS: tl.constexpr = BLOCK_T if HAS_NORM else 1
    tile = tl.broadcast_to(channel, (TILE_ROWS, BLOCK_C))
    if program < num_rows:
        in_tile = (tl.arange(0, TILE_ROWS) == 0)[:, None] & (channel < CHANNELS)
        gains = load_gains(gain, tile, CHANNELS, HAS_NORM)
        convolve_row(
            x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag, program, channel, tile, in_tile,
            (residual, residual_stride, HAS_RESIDUAL), (out, normed_out, gains, eps, CHANNELS, HAS_NORM),
            num_rows, num_entries, x_stride, tl.program_id(1) == 0,
            load_residual, put_outputs, TAPS, CHANNELS, IS_SHIFT, HAS_RESIDUAL, HAS_NORM, BLOCK_K, BLOCK_H, SCAN, ROW_BLOCK,
        )  # fmt: skip
    else:
        first_token, has_work = (program - num_rows) * BLOCK_T, True
        if IS_SPARSE:
            token = first_token + tl.arange(0, BLOCK_T)
            is_padding, is_later = places(token, query_start, num_rows, TAPS, ROW_BLOCK)
            has_work = tl.max(((is_padding | is_later) & (token < num_tokens)).to(tl.int32), axis=0) > 0
        if has_work:
            gains = load_gains(gain, channel, CHANNELS, HAS_NORM)
            convolve_later_tokens(
                x, taps, query_start, first_token, channel,
                (residual, residual_stride, HAS_RESIDUAL), (out, normed_out, gains, eps, CHANNELS, HAS_NORM),
                num_tokens, num_rows, x_stride,
                load_residual, put_outputs, rows.dtype.element_ty, TAPS, CHANNELS, IS_SHIFT, HAS_RESIDUAL, BLOCK_T, ROW_BLOCK,
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
    usual = tile_of(tokens, num_rows, channels)
    tile = usual if norm is None else normed_tile(channels)
    launch(
        convolve_kernel,
        (num_rows + triton.cdiv(tokens, tile.tokens), triton.cdiv(channels, tile.channels)),
        x, x if taps is None else taps, rows, row_tags, *index, extra, out if norm is None else norm.gain, out,
        normed_out, tokens, num_rows, entry_tag.shape[0], x.stride(0), extra.stride(0), 0.0 if norm is None else norm.eps,
        TAPS=history + 1, CHANNELS=channels, IS_SHIFT=taps is None, HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None, IS_SPARSE=tokens <= history * num_rows, BLOCK_T=tile.tokens, BLOCK_C=tile.channels,
        BLOCK_K=max(tile.tokens, usual.tokens), BLOCK_H=triton.next_power_of_2(history), SCAN=SCAN, ROW_BLOCK=ROW_BLOCK,
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
