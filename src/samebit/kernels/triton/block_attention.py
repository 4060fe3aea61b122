"""Attention of blocks of guesses: over pages, and over keys and values of their own that enter none.

The kernel is that of attention.py, where such a row's own keys are one more chunk. Knows no drafter.
"""

from torch import Tensor

from samebit.kernels.triton.attention import TILINGS, Rows, Tiling, attend


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    window: int,
    is_causal: bool,
    scale: float,
    threads: int,
) -> Tensor:
    """See ``KernelSet.block_attention``; ``q``, ``k`` and ``v`` are rounded to the pages' dtype, which the result has."""
    tiling = TILINGS[k_pages.dtype]
    return attend_blocks(q, k, v, k_pages, v_pages, lengths, row_slots, page_table, window, is_causal, scale, tiling)


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    window: int,
    is_causal: bool,
    scale: float,
    tiling: Tiling,
) -> Tensor:
    """The same, cut in a way of the caller's choice."""
    assert k.stride(1) == v.stride(1) == 1
    block_tokens = q.shape[0] // lengths.shape[0]
    rows = Rows(lengths, lengths, row_slots, page_table, block_tokens, block_tokens, is_causal, k, v)
    no_bias = q.new_empty(0, 1)
    return attend(q, q, no_bias, q, k_pages, v_pages, rows, window, scale, tiling)
