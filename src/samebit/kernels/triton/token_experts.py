"""The experts' second product for few tokens: a program has some columns of all slots of one, and adds them up itself.

A tile has the weight rows of those columns, one after the other for each column's slots, and the hidden rows of all slots; of a weight
row's products only that with its own slot's hidden row is wanted. Sums run as in ``linear``, and slots are added in their order as in
``experts``, so a token has the bits that it has among others. Knows not how experts are chosen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.launch import dot_dtype, launch
from samebit.kernels.triton.linear import BLOCK_K, ENOUGH_PROGRAMS, chain, stages_for, whole_span


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows of a tile, steps along K that are loaded together, and how it is compiled."""

    rows: int
    span: int
    num_warps: int
    num_stages: int


TILES = {
    torch.bfloat16: (Tile(128, 1, 8, 6), Tile(64, 1, 4, 6)),
    torch.float32: (Tile(32, 1, 4, 3), Tile(16, 1, 4, 3)),
}
"""By activation dtype, the largest first; a multiprocessor has room for two programs of each."""


def tile_of(num_tokens: int, width: int, num_slots: int, dtype: torch.dtype) -> Tile:
    """The largest tile that makes enough programs, else the smallest; its shape changes no bits."""
    *larger, smallest = TILES[dtype]
    for tile in larger:
        if num_tokens * triton.cdiv(width, columns_of(tile, num_slots)) >= ENOUGH_PROGRAMS:
            return tile
    return smallest


def columns_of(tile: Tile, num_slots: int) -> int:
    """Output columns of a program."""
    columns: int = tile.rows // triton.next_power_of_2(num_slots)
    return max(1, columns)


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def down_of_tokens_kernel(
    hidden,
    w2,
    ids,
    weights,
    num_tokens,
    out,
    width,
    num_in,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """The weighted sum over a token's slots of its rows of ``hidden`` [T * slots, I] times their experts' second weights: BLOCK_H columns of ``out`` [T, H]."""
    token = tl.program_id(1)
    first = token * SLOTS
    # What is needed last is asked for first, so that nobody waits for it.
    live, factors = tl.load(num_tokens), tl.tuple(())
    for i in tl.static_range(SLOTS):
        factors += (tl.load(weights + first + i),)
    row, place = tl.arange(0, BLOCK_H * SLOTS_WIDTH), tl.arange(0, BLOCK_T)
    # Slots are next to each other, so that those of a column meet within a warp.
    slot, h = row % SLOTS_WIDTH, tl.program_id(0) * BLOCK_H + row // SLOTS_WIDTH
    # Padding's may be any number. A slot or column that is not there is another one: its sums are not looked at.
    expert = tl.minimum(tl.load(ids + first + tl.minimum(slot, SLOTS - 1)).to(tl.uint32), EXPERTS - 1).to(tl.int64)
    matrix = w2 + (expert * width + tl.minimum(h, width - 1))[:, None] * num_in
    inputs = hidden + (first + place)[:, None] * num_in
    total = chain(
        matrix, inputs, (place < SLOTS)[:, None], num_in,
        BLOCK_H * SLOTS_WIDTH, BLOCK_T, BLOCK_K, SPAN, EVEN_K, DOT,
    )  # fmt: skip
    # One of many is picked by the sum of its bits and zeros: no rounding, and -0.0 stays what it is.
    bits = tl.where(slot[:, None] == place[None, :], total.to(tl.int32, bitcast=True), 0)
    bits = tl.reshape(tl.sum(bits, 1), (BLOCK_H, SLOTS_WIDTH))
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for i in tl.static_range(SLOTS):
        is_it = (tl.arange(0, SLOTS_WIDTH) == i)[None, :]
        value = tl.sum(tl.where(is_it, bits, 0), 1).to(tl.float32, bitcast=True)
        sums = tl.fma(factors[i], value, sums)
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    # What padding's slots hold is not told from numbers.
    sums = tl.where(live > token, sums, 0.0)
    tl.store(out + token * width + column, sums.to(out.dtype.element_ty), mask=column < width)


def down_of_tokens(hidden: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, num_tokens: Tensor, out: Tensor) -> None:
    """Fill ``out`` [T, H] with each token's sum over slots of ``weights`` [T, slots] times rows of ``hidden`` [T * slots, I] times ``w2`` [E, H, I] of ``ids``.

    All are dense; zeros from ``num_tokens`` [1] on, whatever the others hold there.
    """
    num_experts, width, num_in = w2.shape
    num_rows, num_slots = weights.shape
    tile = tile_of(num_rows, width, num_slots, hidden.dtype)
    columns, slots_width = columns_of(tile, num_slots), triton.next_power_of_2(num_slots)
    span = whole_span(tile.span, num_in, hidden.dtype)
    launch(
        down_of_tokens_kernel, (triton.cdiv(width, columns), num_rows),
        hidden, w2, ids, weights, num_tokens, out, width, num_in,
        SLOTS=num_slots, EXPERTS=num_experts, SLOTS_WIDTH=slots_width, BLOCK_H=columns, BLOCK_T=max(16, slots_width),
        BLOCK_K=BLOCK_K[hidden.dtype], SPAN=span, EVEN_K=num_in % BLOCK_K[hidden.dtype] == 0, DOT=dot_dtype(hidden.dtype),
        num_warps=tile.num_warps, num_stages=stages_for(tile.num_stages, span, num_in, hidden.dtype),
    )  # fmt: skip
