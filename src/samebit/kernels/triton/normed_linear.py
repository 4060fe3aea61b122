"""Sum, norm, product and gated activation of few rows in one launch: the bits of ``add_norm``, ``linear`` and ``swiglu`` one after the other.

Every program norms the whole rows, of which there are few and which are short, and multiplies a tile of weight rows by them. A chain over
K is ``linear.chain``'s, and what would have been stored between launches is rounded as it would have been. A row's norm lies over threads as
that of ``rows.norm_kernel`` does where the compiler knows both terms to be aligned, and the second to be an activation: there it lays
rows out by what the norm stores, here by the term of fewest bytes. Knows nothing of layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton import rows
from samebit.kernels.triton.launch import dot_dtype, launch
from samebit.kernels.triton.linear import BLOCK_K, LONG_IN, product, tile_of
from samebit.kernels.triton.rows import inverse_root, norm_tile

MOST_ROWS = 16
"""Rows of the narrowest tile: for more, all of a row's columns would be held for too many of them."""
MOST_COLUMNS = 256
"""Of a row: what is read of longer ones is more than registers hold."""
assert MOST_COLUMNS < LONG_IN, "a product of segments is summed in another order"


@triton.jit
def parts_of(rows, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """The columns of ``rows`` [R, 1], BLOCK_K of them in each of PARTS parts."""
    column, found = tl.arange(0, BLOCK_K)[None, :], ()
    for part in tl.static_range(PARTS):
        found = found + (tl.load(rows + part * BLOCK_K + column),)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no other way
    return found


@triton.jit(do_not_specialize=["num_rows"])
def normed_linear_kernel(
    x, y, gain, weight, total, out, num_rows, num_out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_GATED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out [T, N]; the first program also stores ``total`` [T, WIDTH] = x + y.

    With IS_GATED the weight has N gate rows and then N up rows. All that is read is asked for before any of it is needed.
    """
    PARTS: tl.constexpr = WIDTH // BLOCK_K
    OUT: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A row of either that is not there is another one: its sums are not stored.
    row = tl.minimum(n, num_out - 1).to(tl.int64)[:, None]
    gates = parts_of(weight + row * WIDTH, BLOCK_K, PARTS)
    if IS_GATED:
        ups = parts_of(weight + (row + num_out) * WIDTH, BLOCK_K, PARTS)
    t, column = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK)[None, :]
    token = tl.minimum(t, num_rows - 1).to(tl.int64)[:, None]
    x_rows, y_rows, is_row, there = x + token * WIDTH, y + token * WIDTH, (t < num_rows)[:, None], column < WIDTH
    values = tl.load(x_rows + column, mask=there, other=0.0).to(tl.float32)
    values += tl.load(y_rows + column, mask=there, other=0.0).to(tl.float32)
    xs, ys = parts_of(x_rows, BLOCK_K, PARTS), parts_of(y_rows, BLOCK_K, PARTS)
    # Once for each row, so that they lie over threads as rows do.
    gains = parts_of(gain + tl.zeros((BLOCK_T, 1), tl.int32), BLOCK_K, PARTS)
    if tl.program_id(0) == 0:
        tl.store(total + token * WIDTH + column, values, mask=is_row & there)
    scale = inverse_root(values, eps, WIDTH)
    result = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        normed = ((xs[part].to(tl.float32) + ys[part].to(tl.float32)) * scale * gains[part]).to(OUT)
        operand = tl.trans(normed.to(DOT))
        result = tl.dot(gates[part].to(DOT), operand, result, input_precision="ieee")
        if IS_GATED:
            up = tl.dot(ups[part].to(DOT), operand, up, input_precision="ieee")
    if IS_GATED:
        gate, up = result.to(OUT).to(tl.float32), up.to(OUT).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
    at = out + token * num_out + n[None, :]
    tl.store(at, tl.trans(result).to(OUT), mask=is_row & (n < num_out)[None, :])


def is_at_once(activation: torch.dtype, x: Tensor, y: Tensor) -> bool:
    """Whether one launch does it all: rows are few and short, of whole steps along K, and norms lie over threads as they do alone."""
    num_rows, width = x.shape
    is_small = 0 < num_rows <= MOST_ROWS and width <= MOST_COLUMNS and width % BLOCK_K[activation] == 0
    is_aligned = all(term.is_contiguous() and term.data_ptr() % 16 == 0 for term in (x, y))
    return is_small and is_aligned and y.dtype is activation and x.dtype in {torch.float32, activation}


def normed_linear(
    activation: torch.dtype,
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    num_out: int,
    library: bool,
    is_gated: bool,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """See ``KernelSet.normed_linear``; ``x`` and ``y`` are of any float dtypes."""
    num_rows, width = x.shape
    assert x.shape == y.shape, (x.shape, y.shape)
    assert (gain.shape, weight.shape) == ((width,), (num_out, width)), (gain.shape, weight.shape)
    if not is_at_once(activation, x, y):
        total, normed = rows.add_norm(activation, x, y, gain, eps, threads)
        out = product(activation, normed, weight, num_out, False, library, threads)
        return total, rows.swiglu(activation, out, threads) if is_gated else out
    columns, (block, _, warps) = num_out // 2 if is_gated else num_out, norm_tile(width)
    total = torch.empty((num_rows, width), dtype=torch.float32, device=x.device)
    out = torch.empty((num_rows, columns), dtype=activation, device=x.device)
    tile = tile_of(num_rows, num_out, width, activation)
    launch(
        normed_linear_kernel, (triton.cdiv(columns, tile.weights),), x, y, gain, weight, total, out, num_rows, columns,
        eps, WIDTH=width, BLOCK=block, BLOCK_N=tile.weights, BLOCK_T=tile.tokens,
        BLOCK_K=BLOCK_K[activation], IS_GATED=is_gated, DOT=dot_dtype(activation), num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return total, out
