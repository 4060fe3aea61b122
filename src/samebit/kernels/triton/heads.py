"""Heads of a few tokens normed on a device, each by itself, and turned by their positions.

A program owns a few heads. A head's sum is laid out as that of a norm of its width; its halves are exchanged by reading it once
more. Knows no attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.rows import inverse_root, norm_tile


@triton.jit
def head_rows(x, gain, column, there, eps, position, cos, sin, WIDTH: tl.constexpr, IS_TURNED: tl.constexpr):
    """The heads at ``x`` [ROWS, 1] in fp32, normed as ``norm_kernel`` does, then turned by ``position`` [ROWS, 1] if IS_TURNED."""
    values = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
    gains = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if IS_TURNED:
        other, at = (column + WIDTH // 2) % WIDTH, position * WIDTH + column
        exchanged = tl.load(x + other, mask=there, other=0.0).to(tl.float32)
        exchanged_gains = tl.load(gain + other, mask=column < WIDTH, other=0.0).to(tl.float32)
        own, others = tl.load(cos + at, mask=there, other=0.0), tl.load(sin + at, mask=there, other=0.0)
    scale = inverse_root(values, eps, WIDTH)
    out = values * scale * gains
    if IS_TURNED:
        out = out * own + exchanged * scale * exchanged_gains * others
    return out


@triton.jit
def position_of(positions, token, there, IS_TURNED: tl.constexpr):
    """Where the tokens stand, for ``head_rows``."""
    position = token
    if IS_TURNED:
        position = tl.load(positions + token, mask=there, other=0).to(tl.int64)
    return position


@triton.jit(do_not_specialize=["num_rows", "positions"])
def turn_heads_kernel(
    x, gains, positions, cos, sin, out, num_rows, eps,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS heads, each with gains of its own."""
    row, column = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    there = (row < num_rows) & (column < WIDTH)
    position = position_of(positions, token, row < num_rows, True)
    heads = x + token * X_STRIDE + head * WIDTH
    turned = head_rows(heads, gains + head * WIDTH, column, there, eps, position, cos, sin, WIDTH, True)
    tl.store(out + row.to(tl.int64) * WIDTH + column, turned, mask=there)


def turn_heads(
    activation: torch.dtype,
    x: Tensor,
    gains: Tensor,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    threads: int,
) -> Tensor:
    """See ``KernelSet.turn_heads``; ``x`` is of any float dtype, and its rows may lie apart."""
    (tokens, columns), (heads, width) = x.shape, gains.shape
    assert (columns, width % 2, x.stride(1)) == (heads * width, 0, 1)
    block, rows, warps = norm_tile(width)
    out = torch.empty((tokens, columns), dtype=activation, device=x.device)
    launch(
        turn_heads_kernel, (triton.cdiv(tokens * heads, rows),), x, gains, positions, cos, sin, out, tokens * heads, eps,
        X_STRIDE=x.stride(0), HEADS=heads, WIDTH=width, ROWS=rows, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out
