"""The relative bias of attention: what a query row adds to its scores at each distance, whatever key is there.

A tile of query rows and a block of keys see few distances, one run of them. A product of the rows' features with the profiles of
that run is a table, from which every score takes its own entry. The features are one step of the product, so what a row gives to
a distance depends on neither tile nor block. Knows no keys.
"""

import math

import triton
import triton.language as tl


def most_rows(group: int, block_n: int) -> int:
    """Query rows, ``group`` a token, of the highest tile that sees at most twice as many distances as there are keys in a block."""
    return 1 << (group * block_n).bit_length() - 1


def table_shape(features: int, group: int, block_m: int, block_n: int) -> dict[str, int]:
    """Sizes of the product for a tile of ``block_m`` query rows: BLOCK_R x SPAN, from a distance that is a multiple of ALIGN."""
    tokens = (block_m - 1 + group - math.gcd(block_m, group)) // group + 1
    distances = block_n + tokens - 1
    span = triton.next_power_of_2(distances)
    align = max(n for n in (1, 2, 4, 8) if distances + n - 1 <= span)
    return {"BLOCK_R": max(16, triton.next_power_of_2(features)), "SPAN": span, "ALIGN": align}


@triton.jit
def relative_bias(
    rel,  # [M, BLOCK_R], rounded to DOT
    rel_proj,
    token,  # [M]: which of the tile's tokens, from 0, a query row is of
    nearest,  # distance of the first token from the last key; negative if that comes later
    D_REL: tl.constexpr,
    EXTENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Bias of a tile and a block of keys, [M, BLOCK_N]; 0 from the extent on."""
    rows: tl.constexpr = token.shape[0]
    first = tl.multiple_of(nearest & -ALIGN, ALIGN)
    feature = tl.arange(0, BLOCK_R)[:, None]
    distance = (first + tl.arange(0, SPAN))[None, :]
    wanted = (feature < D_REL) & (distance >= 0) & (distance < EXTENT)
    profile = tl.load(rel_proj + feature * EXTENT + distance, mask=wanted, other=0.0).to(DOT)
    table = tl.dot(rel, profile, input_precision="ieee")
    # In memory the threads of a warp, 8 rows of 4 pairs of columns each, must not meet in a bank, neither storing nor loading.
    table = tl.permute(tl.reshape(table, (rows // 8, 8, SPAN // 8, 4, 2)), (0, 2, 4, 1, 3))
    row, key = tl.arange(0, rows)[:, None], tl.arange(0, BLOCK_N)[None, :]
    column = token[:, None] + (nearest - first + BLOCK_N - 1) - (key & 7)  # of the key at this place of the first eight
    entry = (row >> 3) * (8 * SPAN) + (row & 7) * 4 + (column >> 3) * 64 + (column & 1) * 32 + (column >> 1 & 3)
    entry -= (key >> 3) * 64
    bias = tl.gather(tl.reshape(table, (rows * SPAN,)), tl.reshape(entry, (rows * BLOCK_N,)), 0)
    return tl.reshape(bias, (rows, BLOCK_N))
