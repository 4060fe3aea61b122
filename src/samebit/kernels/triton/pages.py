"""Keys and values of a step's tokens go into pages, and completed pages are stamped; queries on the way are normed as keys are.

A program owns a few heads of tokens. What stands in slot 0 or page 0 belongs to nobody and is not written. Knows no attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.heads import head_rows, position_of
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.rows import norm_tile


@triton.jit
def write_queries(
    program, q, gain, out, num_tokens, eps, positions, cos, sin, Q_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """ROWS heads of queries, those of a program; see ``head_rows``."""
    row, column = (program * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    token, head = (row // max(1, HEADS)).to(tl.int64), row % max(1, HEADS)
    there = (token < num_tokens) & (column < WIDTH)
    position = position_of(positions, token, token < num_tokens, IS_TURNED)
    at = q + token * Q_STRIDE + head * WIDTH
    query = head_rows(at, gain, column, there, eps, position, cos, sin, WIDTH, IS_TURNED)
    tl.store(out + row.to(tl.int64) * WIDTH + column, query, mask=there)


@triton.jit
def place_of(
    slot, head, column, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Where in pages a head's columns of the token in ``slot`` stand."""
    slot = slot.to(tl.int64)
    return slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE + head * HEAD_STRIDE + column


@triton.jit(do_not_specialize=["num_tokens", "write_slots", "stamp_pages", "stamp_tags", "positions"])
def write_heads_kernel(
    q, k, v, q_gain, k_gain, out, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags, positions, cos, sin,
    num_tokens, eps, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """ROWS heads of queries, or, behind the programs for these, of keys and values; see ``head_rows``."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    query_programs = tl.cdiv(num_tokens * HEADS, ROWS)
    if program < query_programs:
        write_queries(
            program, q, q_gain, out, num_tokens, eps, positions, cos, sin, Q_STRIDE, HEADS, WIDTH, ROWS, BLOCK, IS_TURNED
        )  # fmt: skip
    else:
        row = ((program - query_programs) * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // KV_HEADS).to(tl.int64), row % KV_HEADS
        slot = tl.load(write_slots + token, mask=token < num_tokens, other=0)
        wanted = (slot > 0) & (column < WIDTH)
        place = place_of(slot, head, column, PAGE_STRIDE, HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE)
        value = tl.load(v + token * V_STRIDE + head * WIDTH + column, mask=wanted, other=0.0).to(tl.float32)
        position = position_of(positions, token, token < num_tokens, IS_TURNED)
        at = k + token * K_STRIDE + head * WIDTH
        key = head_rows(at, k_gain, column, wanted, eps, position, cos, sin, WIDTH, IS_TURNED)
        tl.store(k_pages + place, key.to(k_pages.dtype.element_ty), mask=wanted)
        tl.store(v_pages + place, value.to(v_pages.dtype.element_ty), mask=wanted)
        first_head = (head == 0) & (token < num_tokens)
        page = tl.load(stamp_pages + token, mask=first_head, other=0)
        stamp = tl.load(stamp_tags + token, mask=page > 0, other=0)
        tl.store(page_tags + page, stamp, mask=page > 0)


def write_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tags: Tensor,
    write_slots: Tensor,
    stamp_pages: Tensor,
    stamp_tags: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    threads: int,
) -> Tensor:
    """See ``KernelSet.write_heads``; the result is of the pages' dtype, which is that of activations."""
    assert k_pages.stride() == v_pages.stride()
    assert q.stride(1) == k.stride(1) == v.stride(1) == k_pages.stride(3) == 1
    _, kv_heads, page_size, width = k_pages.shape
    tokens, heads, (block, rows, warps) = q.shape[0], q.shape[1] // width, norm_tile(width)
    assert positions is None or width % 2 == 0, width
    out = torch.empty(q.shape, dtype=k_pages.dtype, device=q.device)
    launch(
        write_heads_kernel, (triton.cdiv(tokens * heads, rows) + triton.cdiv(tokens * kv_heads, rows),),
        q, k, v, q_gain, k_gain, out, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags, positions, cos,
        sin, tokens, eps, Q_STRIDE=q.stride(0), K_STRIDE=k.stride(0), V_STRIDE=v.stride(0), PAGE_STRIDE=k_pages.stride(0),
        HEAD_STRIDE=k_pages.stride(1), ROW_STRIDE=k_pages.stride(2), PAGE_SIZE=page_size, HEADS=heads,
        KV_HEADS=kv_heads, WIDTH=width, ROWS=rows, BLOCK=block, IS_TURNED=positions is not None, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
