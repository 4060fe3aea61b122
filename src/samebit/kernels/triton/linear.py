"""Products with weights: one chain over K for each output element, whatever the tile.

Where outputs are few and K is long, a chain of its own for each segment of K, and their sum: segments of one tile may then have programs of
their own. Whether it is so is a matter of N, K and the activation dtype; who adds up is not: sums have the same order everywhere.

A tile has weight rows on its M side and tokens on its N side, so few tokens waste no tensor core rows. BLOCK_K depends on the
activation dtype alone; tiles are a plain function of static sizes. The tensor cores' instructions that the tiles come down to
accumulate the same way (seen on an H200); tests on a device compare them. Where a library's product has the same bits, which
is found out on the device at hand, it may be used instead. Knows nothing of layers.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.last import PAST_L1, counters, is_last
from samebit.kernels.triton.launch import dot_dtype, launch

BLOCK_K = {torch.bfloat16: 64, torch.float32: 32}
"""Length of a step along K, by activation dtype: the grain of every sum."""
ENOUGH_PROGRAMS = 100
"""Programs that keep most multiprocessors of a large device busy."""
GROUP = 8
"""Weight tiles that programs next to each other walk for all tokens, so that both operands are found in L2."""
SEGMENT_STEPS = 4
"""Steps along K of a segment. More than one: a compiler would let a single product go on from the sum of those before it."""
FEW_OUT, LONG_IN = 320, 1024
"""Products of at most so many outputs (those of a router of 256 experts are), and over at least so long a K, are sums of segments."""
MOST_ADDENDS = 8192
"""So many sums of segments, and fewer, are left for who needs them to add up."""
IN_REGISTERS = 128
"""Sums of segments that a thread loads before it adds the first of them up."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and tokens of a tile, steps along K that are loaded together, and how it is compiled."""

    weights: int
    tokens: int
    span: int
    num_warps: int
    num_stages: int


TILES = {
    torch.bfloat16: (
        Tile(128, 256, 1, 8, 3),
        Tile(128, 128, 1, 8, 3),
        Tile(64, 128, 1, 4, 4),
        Tile(64, 64, 2, 4, 3),
        Tile(32, 64, 2, 4, 4),
        Tile(64, 32, 2, 4, 4),
        Tile(64, 32, 4, 4, 4),
        Tile(64, 16, 2, 4, 4),
        Tile(64, 16, 4, 4, 4),
    ),
    torch.float32: (
        Tile(64, 64, 1, 8, 3),
        Tile(32, 64, 1, 4, 3),
        Tile(32, 32, 1, 4, 3),
        Tile(16, 32, 1, 4, 3),
        Tile(32, 16, 1, 4, 3),
        Tile(16, 16, 1, 4, 3),
    ),
}
"""By activation dtype, the largest first, and for equally many the one that loads less ahead; found by benchmarks/tiles.py."""

CUT_TILES = {torch.bfloat16: Tile(64, 16, 1, 4, 5), torch.float32: Tile(16, 16, 1, 4, 5)}
"""That of a segment which has a program of its own: all its steps are under way."""
MOST_CUT_ROWS = 32
"""Rows of a sum of segments up to which each segment has one; for more, handing over what it came to takes longer than one after the other."""


def tile_of(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> Tile:
    """The largest tile that makes enough programs, among those as wide as the tokens; at 64 tokens and more, narrower ones too."""
    if is_cut(num_rows, num_out, num_in, dtype):
        return CUT_TILES[dtype]
    widest = min(256, max(16, triton.next_power_of_2(num_rows)))
    fitting = [tile for tile in TILES[dtype] if min(64, widest) <= tile.tokens <= widest]
    chosen = fitting[-1]
    for tile in fitting:
        if num_tiles(tile, num_rows, num_out) >= ENOUGH_PROGRAMS:
            chosen = tile
            break
    return chosen


def num_tiles(tile: Tile, num_rows: int, num_out: int) -> int:
    """Tiles of a result."""
    tiles: int = triton.cdiv(num_out, tile.weights) * triton.cdiv(num_rows, tile.tokens)
    return tiles


def num_segments(num_out: int, num_in: int, dtype: torch.dtype) -> int:
    """The chains over K that an output element is the sum of, in their order."""
    length = SEGMENT_STEPS * BLOCK_K[dtype]
    return num_in // length if num_out <= FEW_OUT and num_in >= LONG_IN and num_in % length == 0 else 1


def is_cut(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> bool:
    """Whether each segment of a sum has a program of its own."""
    return num_rows <= MOST_CUT_ROWS and num_segments(num_out, num_in, dtype) > 1


def whole_span(span: int, num_in: int, dtype: torch.dtype) -> int:
    """The largest part of ``span`` that divides K; a step of zeros is never added."""
    while span > 1 and num_in % (span * BLOCK_K[dtype]):
        span //= 2
    return span


def stages_for(num_stages: int, span: int, num_in: int, dtype: torch.dtype) -> int:
    """``num_stages``, or as many as have all of K under way: further ones take shared memory, and with it time, for nothing."""
    steps: int = triton.cdiv(num_in, span * BLOCK_K[dtype])
    return min(num_stages, 1 + steps)


@triton.jit
def chain(
    weights,  # [BLOCK_N, 1] pointers to weight rows
    inputs,  # [BLOCK_T, 1] pointers to input rows
    is_row,  # [BLOCK_T, 1]: inputs that are there; the others count as zeros
    num_in,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sums over K of weight rows times input rows, [BLOCK_N, BLOCK_T] fp32, in ascending steps of BLOCK_K."""
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    place = tl.arange(0, BLOCK_K)[None, :]
    for first in range(0, num_in, BLOCK_K * SPAN):
        for part in tl.static_range(SPAN):
            k = first + part * BLOCK_K + place
            if EVEN_K:
                w = tl.load(weights + k)
                x = tl.load(inputs + k, mask=is_row, other=0.0)
            else:
                w = tl.load(weights + k, mask=k < num_in, other=0.0)
                x = tl.load(inputs + k, mask=is_row & (k < num_in), other=0.0)
            total = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    out,
    num_rows,
    num_out,
    num_in,
    x_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    """A tile of out [T, N] = x [T, K] times the transposed weight [N, K]."""
    tiles_n, tiles_t = tl.cdiv(num_out, BLOCK_N), tl.cdiv(num_rows, BLOCK_T)
    group, inside = tl.program_id(0) // (GROUP * tiles_t), tl.program_id(0) % (GROUP * tiles_t)
    group_size = tl.minimum(tiles_n - group * GROUP, GROUP)
    n = (group * GROUP + inside % group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = (inside // group_size) * BLOCK_T + tl.arange(0, BLOCK_T)
    # A weight row that is not there is another one: its sums are not stored.
    weights = weight + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * num_in
    inputs = x + t.to(tl.int64)[:, None] * x_stride
    total = chain(
        weights, inputs, (t < num_rows)[:, None], num_in, BLOCK_N, BLOCK_T, BLOCK_K, SPAN, EVEN_K, DOT
    )  # fmt: skip
    at = out + t.to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(at, tl.trans(total).to(out.dtype.element_ty), mask=(t < num_rows)[:, None] & (n < num_out)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def segments_kernel(
    x,
    weight,
    addends,
    out,
    counter,
    num_rows,
    num_out,
    num_in,
    x_stride,
    SEGMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    IS_CUT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DOT: tl.constexpr,
):
    """A tile of out [T, N], the sum of SEGMENTS products of STEPS steps along K.

    With IS_CUT each has a program of its own, and a place in ``addends`` [SEGMENTS, T, N] fp32; the last program of a tile adds them
    up, AT_ONCE of which it loads before the first is needed, if AT_ONCE is not 0. Else one program walks all, SPAN steps at a time.
    """
    tile, tiles_n = tl.program_id(0), tl.cdiv(num_out, BLOCK_N)
    n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = (tile // tiles_n) * BLOCK_T + tl.arange(0, BLOCK_T)
    # A weight row that is not there is another one: its sums are not stored.
    weights = weight + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * num_in
    inputs = x + t.to(tl.int64)[:, None] * x_stride
    is_row = (t < num_rows)[:, None]
    at = t.to(tl.int64)[:, None] * num_out + n[None, :]
    is_there = is_row & (n < num_out)[None, :]
    LENGTH: tl.constexpr = STEPS * BLOCK_K
    if IS_CUT:
        segment = tl.program_id(1)
        weights += segment * LENGTH
        inputs += segment * LENGTH
        part = chain(weights, inputs, is_row, LENGTH, BLOCK_N, BLOCK_T, BLOCK_K, 1, True, DOT)
        size = num_rows.to(tl.int64) * num_out
        tl.store(addends + segment * size + at, tl.trans(part), mask=is_there)
        if AT_ONCE and is_last(counter + tile, SEGMENTS):
            sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
            for first in tl.range(0, SEGMENTS, AT_ONCE, num_stages=1):
                for i in tl.static_range(AT_ONCE):
                    place = addends + (first + i) * size + at
                    wanted = is_there & (first + i < SEGMENTS)
                    sums += tl.load(place, mask=wanted, other=0.0, cache_modifier=PAST_L1)
            tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_there)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        part = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        # One loop over all steps, so that those of the next segment are under way before this one is added.
        for first in range(0, num_in, BLOCK_K * SPAN):
            for step in tl.static_range(SPAN):
                k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                w = tl.load(weights + k)
                row = tl.load(inputs + k, mask=is_row, other=0.0)
                part = tl.dot(w.to(DOT), tl.trans(row.to(DOT)), part, input_precision="ieee")
            if (first + BLOCK_K * SPAN) % LENGTH == 0:
                total += part
                part = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        tl.store(out + at, tl.trans(total).to(out.dtype.element_ty), mask=is_there)


def pack_linear(weight: Tensor, activation: torch.dtype) -> Tensor:
    """A weight [..., N, K] as products take it: bf16 where it is, or activations are; else fp32."""
    dtype = torch.bfloat16 if torch.bfloat16 in (activation, weight.dtype) else torch.float32
    return weight.to(dtype).contiguous()


def linear(activation: torch.dtype, x: Tensor, weight: Tensor, num_out: int, wide: bool, threads: int) -> Tensor:
    """``x`` [T, K], rounded to ``activation``, times the transposed weight [N, K]: [T, N], fp32 if ``wide``."""
    x = x.to(activation)
    (num_rows, num_in), dtype = x.shape, torch.float32 if wide else activation
    assert x.stride(1) == 1, x.stride()
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    tile = tile_of(num_rows, num_out, num_in, activation)
    segments = num_segments(num_out, num_in, activation)
    if segments > 1:
        cut = is_cut(num_rows, num_out, num_in, activation)
        found = torch.empty((segments, num_rows, num_out) if cut else 0, dtype=torch.float32, device=x.device)
        launch_segments(x, weight, found, out, tile, is_cut=cut)
        return out
    span = whole_span(tile.span, num_in, activation)
    launch(
        linear_kernel,
        (num_tiles(tile, num_rows, num_out),),
        x, weight, out, num_rows, num_out, num_in, x.stride(0),
        BLOCK_N=tile.weights,
        BLOCK_T=tile.tokens,
        BLOCK_K=BLOCK_K[activation],
        SPAN=span,
        EVEN_K=num_in % BLOCK_K[activation] == 0,
        GROUP=GROUP,
        DOT=dot_dtype(activation),
        num_warps=tile.num_warps,
        num_stages=stages_for(tile.num_stages, span, num_in, activation),
    )  # fmt: skip
    return out


def launch_segments(x: Tensor, weight: Tensor, found: Tensor, out: Tensor | None, tile: Tile, *, is_cut: bool) -> None:
    """Launch ``segments_kernel`` for the segments ``found`` [S, T, N] if ``is_cut``, and for ``out`` [T, N] if there is one."""
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    segments = num_segments(num_out, num_in, x.dtype)
    at_once = min(segments, max(1, IN_REGISTERS * 32 * tile.num_warps // (tile.weights * tile.tokens)))
    launch(
        segments_kernel,
        (num_tiles(tile, num_rows, num_out), segments if is_cut else 1),
        x, weight, found, found if out is None else out, counters(x.device), num_rows, num_out, num_in, x.stride(0),
        SEGMENTS=segments,
        BLOCK_N=tile.weights,
        BLOCK_T=tile.tokens,
        BLOCK_K=BLOCK_K[x.dtype],
        STEPS=SEGMENT_STEPS,
        SPAN=min(tile.span, SEGMENT_STEPS),
        IS_CUT=is_cut,
        AT_ONCE=0 if out is None else at_once,
        DOT=dot_dtype(x.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def addends(activation: torch.dtype, x: Tensor, weight: Tensor, num_out: int, library: bool, threads: int) -> Tensor:
    """[S, T, N] fp32 whose sum, in ascending order, has the bits of the wide product: its segments for few rows, else itself."""
    segments = num_segments(num_out, x.shape[1], activation)
    if segments == 1 or segments * x.shape[0] * num_out > MOST_ADDENDS:
        return product(activation, x, weight, num_out, True, library, threads)[None]
    x = x.to(activation)
    assert x.stride(1) == 1, x.stride()
    found = torch.empty((segments, x.shape[0], num_out), dtype=torch.float32, device=x.device)
    launch_segments(x, weight, found, None, CUT_TILES[activation], is_cut=True)
    return found


def linear_library(
    activation: torch.dtype, x: Tensor, weight: Tensor, num_out: int, wide: bool, threads: int
) -> Tensor:
    """What ``linear`` computes, by the device's library; a row's bits may depend on how many there are.

    Use it for row counts that ``certified_row_counts`` gives only. What the library chooses by beside the sizes is made the same
    for all inputs: they are dense, and start at a multiple of 16 bytes; torch gives it a workspace of its own for each stream.
    """
    x = x.to(activation).contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    weight = weight.to(activation)
    if not wide or activation is torch.float32:
        return torch.mm(x, weight.mT)
    if x.device.type == "cpu":  # where torch has no such product
        return torch.mm(x.float(), weight.float().mT)
    return torch.mm(x, weight.mT, out_dtype=torch.float32)


def product(
    activation: torch.dtype, x: Tensor, weight: Tensor, num_out: int, wide: bool, library: bool, threads: int
) -> Tensor:
    """``linear``, by the device's ``library`` if that may stand in."""
    compute = linear_library if library else linear
    return compute(activation, x, weight, num_out, wide, threads)


def implementations(activation: torch.dtype) -> dict[str, Callable[..., Any]]:
    """``product`` and ``addends`` for activations of this dtype, as the operators that they are."""
    return {"linear": partial(product, activation), "addends": partial(addends, activation)}


def certified_row_counts(
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    row_counts: Iterable[int],
    device: torch.device,
    *,
    budget_seconds: float = 1.0,
) -> frozenset[int]:
    """Those of ``row_counts`` for which ``linear_library`` was found to give the bits of ``linear``, for activations of ``dtype``.

    Random inputs and a random weight [N, K] = ``weight_shape`` are compared on ``device``, with and without ``wide``. A count
    that is not reached within the time is not certified: it costs speed, never bits. Time in which kernels are compiled is
    not counted, since they are needed anyway.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(weight_shape, generator=generator, device=device, dtype=dtype)
    certified, left_s = set(), budget_seconds
    for num_rows in sorted(set(row_counts)):
        if left_s < 0:
            break
        x = torch.randn(num_rows, weight_shape[1], generator=generator, device=device, dtype=dtype)
        for wide in (False, True):
            linear(dtype, x, weight, weight_shape[0], wide, 1)
        begin = time.perf_counter()
        if all(_agree(x, weight, wide) for wide in (False, True)):
            certified.add(num_rows)
        left_s -= time.perf_counter() - begin
    return frozenset(certified)


def _agree(x: Tensor, weight: Tensor, wide: bool) -> bool:
    arguments = (x.dtype, x, weight, weight.shape[0], wide, 1)
    return torch.equal(linear_library(*arguments), linear(*arguments))
