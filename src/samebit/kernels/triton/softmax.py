"""Softmax over keys in two levels: blocks of a chunk one after another, then chunks, both at absolute positions.

A run of keys comes down to three values of each query row: the largest score, in units of log 2, and relative to it the sum of the
weights and the weighted sum of the values. Keys that a query row does not see have weight exactly 0 and leave all three as they are.
The weights are summed by the same kind of product as the values, in an order that no layout of a tile changes. Compile with
enable_fp_fusion=False: what stays in registers and what goes through scratch memory must have the same bits. Knows no pages.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SUM_COLUMNS = tl.constexpr(16)
"""Columns of the product that sums weights, the narrowest there is; all are equal."""


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Largest score, sum of weights [M, SUM_COLUMNS] and sum of values [M, WIDTH] of an empty run."""
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return top, tl.zeros((BLOCK_M, SUM_COLUMNS), tl.float32), tl.zeros((BLOCK_M, WIDTH), tl.float32)


@triton.jit
def power_of_two(score, top):
    """2^(score - top), and 0 where nothing has been seen."""
    return tl.exp2(score - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def add_keys(top, total, sums, scores, seen, values, DOT: tl.constexpr):
    """A run with a block of keys behind it: scores and whether they are seen [M, N], values [N, WIDTH] in the type DOT."""
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = power_of_two(scores, new_top[:, None]).to(DOT)
    kept = power_of_two(top, new_top)[:, None]
    ones = tl.full((values.shape[0], SUM_COLUMNS), 1.0, DOT)
    total = tl.dot(weights, ones, total * kept, input_precision="ieee")
    sums = tl.dot(weights, values, sums * kept, input_precision="ieee")
    return new_top, total, sums


@triton.jit
def merge_tops(top, next_top):
    """The largest score of two runs, and what the sums of each are scaled by when they are merged."""
    largest = tl.maximum(top, next_top)
    return largest, power_of_two(top, largest), power_of_two(next_top, largest)


@triton.jit
def merge(value, kept, next_value, added):
    """A sum of two runs, of which the second comes later."""
    return tl.fma(next_value, added, value * kept)


@triton.jit
def add_run(top, total, sums, next_top, next_total, next_sums):
    """A run with a run of later keys behind it."""
    top, kept, added = merge_tops(top, next_top)
    total = merge(total, kept[:, None], next_total, added[:, None])
    return top, total, merge(sums, kept[:, None], next_sums, added[:, None])
