"""Norm, gated activation and embedding on a device: one row in, one row out, computed in fp32. Knows nothing of layers.

How a row is laid out over threads, and thus the order of its sum, follows from its width, its dtype and the distance of
rows, never from how many there are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.launch import launch

NORM_ELEMENTS = 1024
"""Columns that a program of the norm works on at least, in whole rows."""
NORM_WARPS = {2048: 4, 4096: 8, 8192: 16}
"""Warps for rows of up to so many columns."""
COLUMNS = 1024
"""Columns of a program of the kernels that work on each element by itself."""


def norm_tile(width: int) -> tuple[int, int, int]:
    """For rows of so many columns: those of a program's tile, how many rows it has, and its warps."""
    block = triton.next_power_of_2(width)
    return block, max(1, NORM_ELEMENTS // block), NORM_WARPS[max(2048, block)]


@triton.jit
def normed(values, gains, eps, WIDTH: tl.constexpr):
    """Rows of ``values`` fp32, with zeros from ``WIDTH`` columns on, over the root of their mean square, times ``gains``."""
    return values * inverse_root(values, eps, WIDTH) * gains


@triton.jit
def inverse_root(values, eps, WIDTH: tl.constexpr):
    """What ``normed`` multiplies each row by."""
    mean = tl.sum(values * values, axis=1) * (1.0 / WIDTH)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, y, gain, total, out, num_rows, x_stride, y_stride, eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of ``WIDTH`` columns, of which a row of ``x`` has PARTS; each is summed as if it were alone.

    With ADDS, of ``x + y``, which ``total`` gets.
    """
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    token, part = (row // PARTS).to(tl.int64), row % PARTS
    there = (row < num_rows) & (column < WIDTH)
    values = tl.load(x + token * x_stride + part * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(y + token * y_stride + part * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        tl.store(total + row.to(tl.int64) * WIDTH + column, values, mask=there)
    gains = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + column, normed(values, gains, eps, WIDTH), mask=there)


def rms_norm(activation: torch.dtype, x: Tensor, gain: Tensor, eps: float, threads: int) -> Tensor:
    """Each C columns of ``x`` [T, n C], of any float dtype, normed with a gain [C]; rows may lie apart."""
    return _norm(activation, x, None, gain, eps)[1]


def add_norm(
    activation: torch.dtype, x: Tensor, y: Tensor, gain: Tensor, eps: float, threads: int
) -> tuple[Tensor, Tensor]:
    """``x + y`` in fp32, whatever they are, and its norm."""
    return _norm(activation, x, y, gain, eps)


def _norm(activation: torch.dtype, x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What was normed, and the norm. Without ``y`` the sum is ``x`` itself."""
    added = x if y is None else y
    assert x.stride(1) == added.stride(1) == 1, (x.stride(), added.stride())
    assert x.shape == added.shape
    (tokens, columns), width = x.shape, gain.shape[0]
    total = x if y is None else torch.empty((tokens, columns), dtype=torch.float32, device=x.device)
    out = torch.empty((tokens, columns), dtype=activation, device=x.device)
    parts, (block, rows, warps) = columns // width, norm_tile(width)
    launch(
        norm_kernel,
        (triton.cdiv(tokens * parts, rows),),
        x, added, gain, total, out, tokens * parts, x.stride(0), added.stride(0), eps,
        WIDTH=width, PARTS=parts, ROWS=rows, BLOCK=block, ADDS=y is not None,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return total, out


@triton.jit
def swiglu_kernel(z, out, z_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up for a row gate | up."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    gate = tl.load(z + row * z_stride + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(z + row * z_stride + WIDTH + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gate / (1.0 + tl.exp(-gate)) * up, mask=there)


def swiglu(activation: torch.dtype, z: Tensor, threads: int) -> Tensor:
    """``z`` [T, 2I] of any float dtype to [T, I]; rows may lie apart."""
    assert z.stride(1) == 1, z.stride()
    tokens, width = z.shape[0], z.shape[1] // 2
    out = torch.empty((tokens, width), dtype=activation, device=z.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(
        swiglu_kernel,
        (tokens * triton.cdiv(width, block),),
        z, out, z.stride(0),
        WIDTH=width, BLOCK=block, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["ids"])
def embedding_kernel(ids, table, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row of ``table`` that a token's id names."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    row = tl.load(ids + token).to(tl.int64)
    tl.store(out + token * WIDTH + column, tl.load(table + row * WIDTH + column, mask=there).to(tl.float32), mask=there)


def embedding(activation: torch.dtype, ids: Tensor, table: Tensor, threads: int) -> Tensor:
    """Rows ``ids`` [T] int32, which must be there, of ``table`` [V, C]."""
    (tokens,), width = ids.shape, table.shape[1]
    assert table.is_contiguous(), table.stride()
    out = torch.empty((tokens, width), dtype=activation, device=table.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(embedding_kernel, (tokens * triton.cdiv(width, block),), ids, table, out, WIDTH=width, BLOCK=block)
    return out


def implementations(activation: torch.dtype) -> dict[str, Callable[..., Any]]:
    """These kernels for activations of this dtype, with the arguments of the operators."""
    return {
        "rms_norm": partial(rms_norm, activation),
        "add_norm": partial(add_norm, activation),
        "swiglu": partial(swiglu, activation),
        "embedding": partial(embedding, activation),
    }
