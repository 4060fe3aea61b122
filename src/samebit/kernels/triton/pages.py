"""Keys and values of a step's tokens go into pages, and completed pages are stamped.

A program owns a token. What stands in slot 0 or page 0 belongs to nobody and is not written. Knows no attention.
"""

import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.launch import launch

MAX_BLOCK = 1024
"""Columns that a program copies at once."""


@triton.jit(do_not_specialize=["write_slots", "stamp_pages", "stamp_tags"])
def write_kv_kernel(
    k,
    v,
    k_pages,
    v_pages,
    page_tags,
    write_slots,
    stamp_pages,
    stamp_tags,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(write_slots + token).to(tl.int64)
    row = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        wanted = (column < COLUMNS) & (slot > 0)
        place = row + column // WIDTH * HEAD_STRIDE + column % WIDTH
        key = tl.load(k + token * K_STRIDE + column, mask=wanted, other=0.0).to(tl.float32)
        value = tl.load(v + token * V_STRIDE + column, mask=wanted, other=0.0).to(tl.float32)
        tl.store(k_pages + place, key.to(k_pages.dtype.element_ty), mask=wanted)
        tl.store(v_pages + place, value.to(v_pages.dtype.element_ty), mask=wanted)
    page = tl.load(stamp_pages + token)
    tl.store(page_tags + page, tl.load(stamp_tags + token), mask=page > 0)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tags: Tensor,
    write_slots: Tensor,
    stamp_pages: Tensor,
    stamp_tags: Tensor,
    threads: int,
) -> None:
    """See ``KernelSet.write_kv``; ``k``, ``v`` are rounded to the pages' dtype."""
    assert k_pages.stride() == v_pages.stride()
    assert k.stride(1) == v.stride(1) == k_pages.stride(3) == 1
    launch(
        write_kv_kernel, (k.shape[0],), k, v, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags,
        K_STRIDE=k.stride(0), V_STRIDE=v.stride(0), PAGE_STRIDE=k_pages.stride(0), HEAD_STRIDE=k_pages.stride(1),
        ROW_STRIDE=k_pages.stride(2), PAGE_SIZE=k_pages.shape[2], WIDTH=k_pages.shape[3], COLUMNS=k.shape[1],
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(k.shape[1])), num_warps=4,
    )  # fmt: skip
