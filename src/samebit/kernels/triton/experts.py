"""Mixtures of experts: the two products of each expert over the tokens that chose it, and the sum over a token's experts.

A fixed number of programs walk the tiles that the counts on the device ask for. Sums run as in ``linear``, so a tile's shape is free; a
token's slots are added in their order. Few tokens are not grouped: each of their slots is a tile, and they are multiplied by the second
weights and added up in ``token_experts``. Knows nothing of layers; how experts are chosen is ``routing``'s.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.composed import in_order
from samebit.kernels.triton.last import MAX_COUNTERS, PAST_L1, counters, is_last
from samebit.kernels.triton.launch import dot_dtype, launch, num_programs
from samebit.kernels.triton.linear import BLOCK_K, ENOUGH_PROGRAMS, chain, stages_for, whole_span
from samebit.kernels.triton.routing import FEW_PAIRS, Choice, Groups, assign, expert_of, group, route, ungrouped, weigh
from samebit.kernels.triton.token_experts import down_of_tokens

COMBINE_BLOCK = 1024
"""Columns of a token that one program adds up."""
MOST_AT_ONCE = 4
"""Up to so many tokens that are grouped are added up by the programs of the second product, columns by whoever finishes them last."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens and weight rows (of gate: as many of up come with them) of a tile; ``programs`` are those of a multiprocessor."""

    tokens: int
    rows: int
    span: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both products."""

    gate_up: Tile
    down: Tile


TILES = {
    torch.bfloat16: (
        (64, Tiles(Tile(128, 64, 1, 4, 3, 2), Tile(128, 128, 1, 8, 4, 1))),
        (32, Tiles(Tile(64, 64, 1, 4, 4, 2), Tile(64, 64, 1, 4, 4, 2))),
        (8, Tiles(Tile(16, 64, 2, 4, 3, 4), Tile(32, 64, 1, 4, 4, 8))),
        (0, Tiles(Tile(16, 64, 2, 4, 3, 4), Tile(16, 64, 1, 4, 4, 8))),
    ),
    torch.float32: (
        (32, Tiles(Tile(32, 32, 1, 4, 2, 2), Tile(32, 64, 1, 4, 2, 2))),
        (0, Tiles(Tile(16, 16, 1, 4, 3, 4), Tile(16, 32, 1, 4, 3, 4))),
    ),
}
"""By activation dtype and the mean number of pairs of an expert from which on they are used; found by benchmarks/tiles.py."""

DEEP = {torch.bfloat16: Tile(16, 64, 2, 4, 4, 2)}
"""The first product's where there are so few tiles that each has a multiprocessor of its own, and all of its shared memory."""


def tiles_of(num_pairs: int, num_experts: int, intermediate: int, dtype: torch.dtype) -> Tiles:
    """The tiles for so many pairs; their shapes change no bits."""
    tiles = next(tiles for least, tiles in TILES[dtype] if num_pairs >= least * num_experts)
    deep = DEEP.get(dtype)
    if deep and most_tiles(deep, num_pairs, num_experts) * triton.cdiv(intermediate, deep.rows) <= ENOUGH_PROGRAMS:
        return replace(tiles, gate_up=deep)
    return tiles


def most_tiles(tile: Tile, num_pairs: int, num_experts: int) -> int:
    """Tiles of grouped pairs, however these are spread: every expert that has pairs fills all of its tiles but one."""
    most: int = min(num_pairs, triton.cdiv(num_pairs, tile.tokens) + num_experts)
    return most


def is_ungrouped(num_tokens: int, num_slots: int, intermediate: int) -> bool:
    """Whether each slot is a tile of its own: those of a single token, and of more where each bf16 tile has a multiprocessor of its own.

    Padding's slots are tiles then, too; what comes of them is not looked at.
    """
    of_outputs: int = triton.cdiv(intermediate, DEEP[torch.bfloat16].rows)
    return num_tokens == 1 or num_tokens * num_slots * of_outputs <= ENOUGH_PROGRAMS


@triton.jit
def tiles_of_experts(ids, bounds, num_pairs, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr):
    """The number of token tiles, and what ``find_tile`` looks at: per expert, the bounds of its pairs and the number of tiles up to and with it.

    Each pair that is not grouped is a tile. That changes no bits, as a tile has the same shape, and an element the same chain over K,
    whatever else is in the tile.
    """
    if ids is None:
        expert = tl.arange(0, WIDTH)
        start = tl.load(bounds + 2 * expert, mask=expert < EXPERTS, other=0)
        stop = tl.load(bounds + 2 * expert + 1, mask=expert < EXPERTS, other=0)
        tiles = (stop - start + BLOCK_T - 1) // BLOCK_T
        up_to = tl.cumsum(tiles, 0)
        num_tiles, known = tl.max(up_to, 0), (start, stop, tiles, up_to)
    else:
        num_tiles, known = num_pairs, ids  # nothing else is known
    return num_tiles, known


@triton.jit
def find_tile(tile, known, ids, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr):
    """Expert of a token tile, the first place of the tile among the grouped pairs, and where the expert's places end."""
    if ids is None:
        start, stop, tiles, up_to = known
        expert = tl.sum((up_to <= tile).to(tl.int32), 0)
        is_it = tl.arange(0, WIDTH) == expert
        first = tl.sum(tl.where(is_it, start + (tile - up_to + tiles) * BLOCK_T, 0), 0)
        end = tl.sum(tl.where(is_it, stop, 0), 0)
    else:
        expert, first, end = tl.load(ids + tile), tile, tile + 1
    # Padding's may be any number; what comes of it counts as zeros.
    return tl.minimum(expert.to(tl.uint32), EXPERTS - 1).to(tl.int64), first, end


@triton.jit
def pairs_at(pairs, at, end):
    """The pairs at places ``at`` below ``end``; without ``pairs`` each is at its own."""
    return at if pairs is None else tl.load(pairs + at, mask=at < end, other=0)


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,
    w13,
    ids,
    pairs,
    bounds,
    num_pairs,
    hidden,
    x_stride,
    inner,
    num_in,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT: tl.constexpr,
    logits=None,
    bias=None,
    weights=None,
    stride=None,
    part_stride=None,
    scale=None,
    PARTS: tl.constexpr = None,
    ROUTED: tl.constexpr = None,
    TOP_K: tl.constexpr = None,
    SHARED: tl.constexpr = None,
    ROUTED_WIDTH: tl.constexpr = None,
    SLOTS_WIDTH: tl.constexpr = None,
    THREADS: tl.constexpr = None,
):
    """silu(gate) * up of the tokens of grouped pairs: rows of ``hidden`` [places, I] in the order of the groups; TILES are those of I.

    With ``logits``, those of tokens that are not grouped, their experts are found here. The last programs, which have no tile where
    all programs run at once, write the ``weights`` and ``ids`` of a token's slots each for later launches.
    """
    if logits is not None:
        for weighed in range(tl.num_programs(0) - 1 - tl.program_id(0), num_pairs // SLOTS, tl.num_programs(0)):
            weigh(
                logits, bias, weights, ids, weighed, stride, part_stride, scale,
                PARTS, ROUTED, TOP_K, SHARED, ROUTED_WIDTH, SLOTS_WIDTH, THREADS,
            )  # fmt: skip
    num_tiles, known = tiles_of_experts(ids, bounds, num_pairs, EXPERTS, WIDTH, BLOCK_T)
    place = tl.arange(0, BLOCK_K)[None, :]
    for item in range(tl.program_id(0), num_tiles * TILES, tl.num_programs(0)):
        tile = item // TILES
        if logits is None:
            expert, first, end = find_tile(tile, known, ids, EXPERTS, WIDTH, BLOCK_T)
        else:
            chosen = expert_of(
                tile % SLOTS, logits, bias, tile // SLOTS, stride, part_stride, PARTS, ROUTED, TOP_K, ROUTED_WIDTH, THREADS
            )  # fmt: skip
            expert, first, end = chosen.to(tl.int64), tile, tile + 1
        i = (item % TILES) * BLOCK_I + tl.arange(0, BLOCK_I)
        at = first + tl.arange(0, BLOCK_T)
        token = pairs_at(pairs, at, end) // SLOTS
        is_row = (at < end)[:, None]
        inputs = x + token.to(tl.int64)[:, None] * x_stride
        # A weight row that is not there is another one: its sums are not stored.
        row = tl.minimum(i, inner - 1)
        gate_rows = w13 + (expert * 2 * inner + row)[:, None] * num_in
        up_rows = w13 + ((expert * 2 + 1) * inner + row)[:, None] * num_in
        gate = tl.zeros((BLOCK_I, BLOCK_T), dtype=tl.float32)
        up = tl.zeros((BLOCK_I, BLOCK_T), dtype=tl.float32)
        for step in range(0, num_in, BLOCK_K * SPAN):
            for part in tl.static_range(SPAN):
                k = step + part * BLOCK_K + place
                if EVEN_K:
                    a = tl.load(gate_rows + k)
                    b = tl.load(up_rows + k)
                    c = tl.load(inputs + k, mask=is_row, other=0.0)
                else:
                    a = tl.load(gate_rows + k, mask=k < num_in, other=0.0)
                    b = tl.load(up_rows + k, mask=k < num_in, other=0.0)
                    c = tl.load(inputs + k, mask=is_row & (k < num_in), other=0.0)
                columns = tl.trans(c.to(DOT))
                gate = tl.dot(a.to(DOT), columns, gate, input_precision="ieee")
                up = tl.dot(b.to(DOT), columns, up, input_precision="ieee")
        rows = tl.trans(tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up)
        to = hidden + at.to(tl.int64)[:, None] * inner + i[None, :]
        tl.store(to, rows.to(hidden.dtype.element_ty), mask=is_row & (i < inner)[None, :])


@triton.jit
def add_slots(slots, weights, row, h, live, width, NUM_SLOTS: tl.constexpr):
    """The sums over slots, in their order, of tokens ``row`` at columns ``h``; zeros for padding, whose slots hold anything.

    What is rounded is written out, since every kernel that adds up has to do the same.
    """
    total = 0.0
    for slot in tl.static_range(NUM_SLOTS):
        pair = row * NUM_SLOTS + slot
        weight = tl.load(weights + pair, mask=row < live, other=0.0)
        there = (row < live) & (h < width)
        value = tl.load(slots + pair * width + h, mask=there, other=0.0, cache_modifier=PAST_L1)
        total = tl.fma(weight, value, total)
    return total


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_tokens"])
def down_kernel(
    hidden,
    w2,
    pairs,
    bounds,
    slots,
    weights,
    num_tokens,
    out,
    counter,
    num_rows,
    width,
    num_in,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of ``hidden`` times an expert's second weight, each to its pair's row of ``slots`` [pairs, H] fp32; TILES are those of H.

    With ROWS, at least ``num_rows``, the program that finishes the last tile of some columns adds up the slots of all tokens there.
    """
    num_tiles, known = tiles_of_experts(None, bounds, None, EXPERTS, WIDTH, BLOCK_T)
    # Where all tokens are padding, one tile of none gives them their zeros.
    num_tiles = tl.maximum(num_tiles, 1)
    # Asked for before it is needed, so that the last program does not wait for it.
    live = tl.load(num_tokens)
    for item in range(tl.program_id(0), num_tiles * TILES, tl.num_programs(0)):
        expert, first, end = find_tile(item // TILES, known, None, EXPERTS, WIDTH, BLOCK_T)
        h = (item % TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        at = first + tl.arange(0, BLOCK_T)
        is_row = (at < end)[:, None]
        matrix = w2 + (expert * width + tl.minimum(h, width - 1))[:, None] * num_in
        inputs = hidden + at.to(tl.int64)[:, None] * num_in
        total = chain(matrix, inputs, is_row, num_in, BLOCK_H, BLOCK_T, BLOCK_K, SPAN, EVEN_K, DOT)
        pair = pairs_at(pairs, at, end)
        to = slots + pair.to(tl.int64)[:, None] * width + h[None, :]
        tl.store(to, tl.trans(total), mask=is_row & (h < width)[None, :])
        if ROWS and is_last(counter + item % TILES, num_tiles):
            row, column = tl.arange(0, ROWS)[:, None], h[None, :]
            sums = add_slots(slots, weights, row, column, live, width, SLOTS)
            there = (row < num_rows) & (column < width)
            tl.store(out + row * width + column, sums.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def combine_kernel(slots, weights, num_tokens, out, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up a token's slots."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = add_slots(slots, weights, row, h, tl.load(num_tokens), width, SLOTS)
    tl.store(out + row * width + h, total.to(out.dtype.element_ty), mask=h < width)


def mixture(
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_shared: int,
    scale: float,
    num_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    threads: int,
) -> Tensor:
    """``moe`` of the experts and weights that ``route`` gives; few tokens are routed and grouped in one launch, very few in none."""
    if x.shape[0] * (top_k + num_shared) > FEW_PAIRS:
        expert_ids, weights = route(in_order(logits), bias, top_k, num_shared, scale, threads)
        return moe(x, expert_ids, weights, num_tokens, w13, w2, intermediate, threads)
    choice = Choice(logits, bias, top_k, num_shared, scale)
    groups, weights = (
        ungrouped(choice) if is_ungrouped(x.shape[0], choice.num_slots, intermediate) else assign(choice, num_tokens)
    )
    return apply_experts(x, groups, weights, num_tokens, w13, w2, intermediate)


def moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    threads: int,
) -> Tensor:
    """The twin's mixture for ``x`` [T, H] in the activation dtype, with ``w13`` [E, 2I, H] and ``w2`` [E, H, I]; all dense but x.

    ``expert_ids`` of live tokens are below E; those of padding may be anything.
    """
    assert expert_ids.is_contiguous(), expert_ids.stride()
    if is_ungrouped(expert_ids.shape[0], expert_ids.shape[1], intermediate):
        groups = Groups(expert_ids.numel(), ids=expert_ids)
    else:
        groups = group(expert_ids, num_tokens, w13.shape[0])
    return apply_experts(x, groups, weights, num_tokens, w13, w2, intermediate)


def apply_experts(
    x: Tensor, groups: Groups, weights: Tensor, num_tokens: Tensor, w13: Tensor, w2: Tensor, intermediate: int
) -> Tensor:
    """The sum over a token's slots of ``weights`` [T, slots] times the expert that it is grouped with there, for ``moe``'s operands.

    Where the groups are a choice still, it is made, and the weights are filled.
    """
    (num_rows, width), num_slots, num_experts = x.shape, weights.shape[1], w13.shape[0]
    assert x.stride(1) == 1, x.stride()
    assert weights.is_contiguous(), weights.stride()
    num_pairs = num_rows * num_slots
    tiles = tiles_of(num_pairs, num_experts, intermediate, x.dtype)
    hidden, out = (
        torch.empty(shape, dtype=x.dtype, device=x.device)
        for shape in ((groups.num_places, intermediate), (num_rows, width))
    )
    experts = {"EXPERTS": num_experts, "WIDTH": triton.next_power_of_2(num_experts)}
    dot = {"BLOCK_K": BLOCK_K[x.dtype], "DOT": dot_dtype(x.dtype)}

    def programs(tile: Tile, num_out: int, others: int = 0) -> tuple[int]:
        of_pairs = most_tiles(tile, num_pairs, num_experts) if groups.ids is None else num_pairs
        most = of_pairs * triton.cdiv(num_out, tile.rows) + others
        return (min(num_programs(x.device, tile.programs), most),)

    def compiled(tile: Tile, num_out: int, num_in: int) -> dict[str, Any]:
        span = whole_span(tile.span, num_in, x.dtype)
        return {
            "TILES": triton.cdiv(num_out, tile.rows), "BLOCK_T": tile.tokens, "SPAN": span, "EVEN_K": num_in % BLOCK_K[x.dtype] == 0,
            "num_warps": tile.num_warps, "num_stages": stages_for(tile.num_stages, span, num_in, x.dtype), **experts, **dot,
        }  # fmt: skip

    choosing = {} if groups.choice is None else groups.choice.arguments(weights, tiles.gate_up.num_warps)
    launch(
        gate_up_kernel, programs(tiles.gate_up, intermediate, others=num_rows if choosing else 0),
        x, w13, groups.ids, groups.pairs, groups.bounds, num_pairs, hidden, x.stride(0), intermediate, width,
        SLOTS=num_slots, BLOCK_I=tiles.gate_up.rows, enable_fp_fusion=False,
        **compiled(tiles.gate_up, intermediate, width), **choosing,
    )  # fmt: skip
    if groups.ids is not None:
        down_of_tokens(hidden, w2, groups.ids, weights, num_tokens, out)
        return out
    slots = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    is_at_once = num_rows <= MOST_AT_ONCE and triton.cdiv(width, tiles.down.rows) <= MAX_COUNTERS
    launch(
        down_kernel, programs(tiles.down, width),
        hidden, w2, groups.pairs, groups.bounds, slots, weights, num_tokens, out, counters(x.device),
        num_rows, width, intermediate,
        SLOTS=num_slots, BLOCK_H=tiles.down.rows, ROWS=triton.next_power_of_2(num_rows) if is_at_once else 0,
        **compiled(tiles.down, width, intermediate),
    )  # fmt: skip
    launch(
        combine_kernel,
        (0 if is_at_once else num_rows, triton.cdiv(width, COMBINE_BLOCK)),
        slots, weights, num_tokens, out, width, SLOTS=num_slots, BLOCK=COMBINE_BLOCK,
    )  # fmt: skip
    return out
