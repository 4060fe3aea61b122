"""Sums and products in torch whose bits cannot depend on any order of summation.

A float is split into multiples of a power of two small enough that every partial sum is an integer below 2^53, hence
exact in float64. Whatever a BLAS does with tiles, threads, or fused operations, the result is the same number. The
idea is the error-free transformation of Ozaki et al. (2012). Knows nothing of layers or of the step.
"""

import math

import torch
from torch import Tensor

MAX_KEYS_LOG2 = 21
"""Reductions over keys stay exact up to 2^21 keys; the split must not depend on how many there are."""
KEY_BITS = (53 - MAX_KEYS_LOG2) // 2


def slice_bits(length: int) -> int:
    """Bits per slice so that a dot product of ``length`` terms stays below 2^53 units."""
    return (53 - max(1, math.ceil(math.log2(max(length, 2))))) // 2


def power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two > |x| over the last axis, kept as an axis of 1, float64; 1 for a row of zeros."""
    biggest = x.abs().amax(-1, keepdim=True).to(torch.float64)
    exponent = torch.frexp(biggest).exponent.to(torch.int64).clamp(-400, 400)
    return ((exponent + 1023) << 52).view(torch.float64)


def split(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Write ``x`` [..., K] as ``high + low`` float64, both of ``bits`` bits below the largest |x| of each row.

    What is lost is below 2^(-2 bits) of that largest value.
    """
    unit = power_of_two_above(x) * 2.0**-bits
    wide = x.to(torch.float64)
    high = torch.round(wide / unit) * unit
    unit = unit * 2.0**-bits
    return high, torch.round((wide - high) / unit) * unit


def dot(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """``a @ b.mT`` in float64 for two split operands [..., M, K] and [..., N, K]; the low-low part is below the error."""
    low = torch.matmul(a[0], b[1].mT) + torch.matmul(a[1], b[0].mT)
    return torch.matmul(a[0], b[0].mT) + low


def sum_last(x: Tensor, length_log2: int) -> Tensor:
    """Sum over the last axis (at most 2^length_log2 terms), float64, the axis kept as 1."""
    unit = power_of_two_above(x) * 2.0 ** -(52 - length_log2)
    return (torch.round(x.to(torch.float64) / unit) * unit).sum(-1, keepdim=True)
