"""Keys and values are convolved on their way into pages, in the launch that norms heads. Knows no attention.

Few tokens only, whose programs all run at once. A program has a few heads of keys and values, of one token at a time; their
inputs go into the pool as in any convolution (``conv_programs``). Queries' heads have programs of their own.

The bits are those of two launches: what is convolved is rounded as a pool would hold it, and a tile of heads is that of
``pages``, so that each lies over threads as it does there (``conv`` says what decides that). The heads of a tile are to be
channels side by side, which they are where their width is a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.conv import INDEX, NORMED_REGISTERS, NORMED_WARPS, SCAN, VECTOR, short_conv, tile_of
from samebit.kernels.triton.conv_programs import convolve_later_tokens, convolve_row, places
from samebit.kernels.triton.index import ROW_BLOCK
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.pages import place_of, write_heads, write_queries
from samebit.kernels.triton.rows import norm_tile, normed


def is_written_at_once(num_tokens: int, num_rows: int, heads: int, kv_heads: int, width: int) -> bool:
    """Whether a step is one launch: where heads allow it, and all programs run at once."""
    block, rows, num_warps = norm_tile(width)
    if width % VECTOR or width != block:
        return False
    return programs_of(num_tokens, num_rows, heads, kv_heads, rows) * num_warps <= NORMED_WARPS


def programs_of(num_tokens: int, num_rows: int, heads: int, kv_heads: int, rows: int) -> int:
    """Programs of so many heads: for each batch row and each token those for keys and values, and those for all queries."""
    return int((num_rows + num_tokens) * triton.cdiv(2 * kv_heads, rows) + triton.cdiv(num_tokens * heads, rows))


@triton.jit
def load_place(token, there, channel, is_channel, write_slots, stamp_pages, stamp_tags, is_first):
    """Slot of a token, the page that it completes, and that page's stamp."""
    slot = tl.load(write_slots + token, mask=there, other=0)
    page = tl.load(stamp_pages + token, mask=there & is_first, other=0)
    stamp = tl.load(stamp_tags + token, mask=there & is_first, other=0)
    return slot, page, stamp


@triton.jit
def put_heads(
    y, asked, token, there, channel, is_channel, k_pages, v_pages, page_tags, gains, eps, head, column,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Store heads ``y`` of a token, keys' before values', in its slot, and stamp the page that it completes."""
    slot, page, stamp = asked
    wanted, is_key = there & (slot > 0) & is_channel, head < KV_HEADS
    kept = y.to(k_pages.dtype.element_ty)
    keys = normed(kept.to(tl.float32), gains, eps, WIDTH)
    place = place_of(slot, head % KV_HEADS, column, PAGE_STRIDE, HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE)
    tl.store(k_pages + place, keys.to(k_pages.dtype.element_ty), mask=wanted & is_key)
    tl.store(v_pages + place, kept, mask=wanted & (head >= KV_HEADS))
    tl.store(page_tags + page, stamp, mask=there & (page > 0))


@triton.jit(do_not_specialize=[*INDEX, "write_slots", "stamp_pages", "stamp_tags"])
def convolve_heads_kernel(
    x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
    entry_sources, entry_source_tags, entry_dest, entry_tag, q, q_gain, k_gain, out, k_pages, v_pages, page_tags,
    write_slots, stamp_pages, stamp_tags, num_tokens, num_rows, num_entries, x_stride, eps,
    TAPS: tl.constexpr, Q_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    IS_SPARSE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, SCAN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs for each batch row, then for each token, most of which find nothing to do if IS_SPARSE, then for queries.

    Of those for a row or token, each has ROWS heads of keys and values.
    """
    CHANNELS: tl.constexpr = 2 * KV_HEADS * WIDTH
    BLOCKS: tl.constexpr = (2 * KV_HEADS + ROWS - 1) // ROWS
    program, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if program >= num_rows + num_tokens:
        write_queries(
            tl.program_id(0) - (num_rows + num_tokens) * BLOCKS, q, q_gain, out, num_tokens, eps, None, None, None,
            Q_STRIDE, HEADS, WIDTH, ROWS, WIDTH, False,
        )  # fmt: skip
    else:
        head, column = block * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
        tile = head * WIDTH + column
        gains = tl.load(k_gain + column).to(tl.float32)
        asking = (write_slots, stamp_pages, stamp_tags, block == 0)
        putting = (
            k_pages, v_pages, page_tags, gains, eps, head, column, KV_HEADS, WIDTH, PAGE_STRIDE, HEAD_STRIDE, ROW_STRIDE,
            PAGE_SIZE,
        )  # fmt: skip
        if program < num_rows:
            convolve_row(
                x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows,
                write_tags, entry_sources, entry_source_tags, entry_dest, entry_tag, program,
                block * ROWS * WIDTH + tl.arange(0, ROWS * WIDTH)[None, :], tile, tile < CHANNELS,
                asking, putting,
                num_rows, num_entries, x_stride, block == 0,
                load_place, put_heads, TAPS, CHANNELS, False, False, True, BLOCK_K, BLOCK_H, SCAN, ROW_BLOCK,
            )  # fmt: skip
        else:
            token, has_work = program - num_rows, True
            if IS_SPARSE:
                # Padding has no slot, so nothing of it is stored.
                _, is_later = places(token + tl.arange(0, 1), query_start, num_rows, TAPS, ROW_BLOCK)
                has_work = tl.max(is_later.to(tl.int32), axis=0) > 0
            if has_work:
                convolve_later_tokens(
                    x, taps, query_start, token, tile,
                    asking, putting,
                    num_tokens, num_rows, x_stride,
                    load_place, put_heads, rows.dtype.element_ty, TAPS, CHANNELS, False, False, 1, ROW_BLOCK,
                )  # fmt: skip


def conv_heads(
    q: Tensor, kv: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor,
    read_tags: Tensor, store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor,
    entry_sources: Tensor, entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, q_gain: Tensor,
    k_gain: Tensor, eps: float, k_pages: Tensor, v_pages: Tensor, page_tags: Tensor, write_slots: Tensor,
    stamp_pages: Tensor, stamp_tags: Tensor, threads: int,
) -> Tensor:  # fmt: skip
    """``short_conv`` of ``kv`` and ``write_heads``, in one launch if ``is_written_at_once``; operands are fp32 or like pages."""
    operands = (q, kv, taps, q_gain, k_gain)
    assert all(operand.dtype in (torch.float32, k_pages.dtype) for operand in operands), [o.dtype for o in operands]
    assert rows.dtype is k_pages.dtype, (rows.dtype, k_pages.dtype)
    _, kv_heads, page_size, width = k_pages.shape
    (tokens, columns), (num_rows, history), heads = q.shape, read_rows.shape, q.shape[1] // width
    index = (
        query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags, entry_sources,
        entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip
    stamps = write_slots, stamp_pages, stamp_tags
    if not is_written_at_once(tokens, num_rows, heads, kv_heads, width):
        k, v = short_conv(kv, taps, rows, row_tags, *index, None, threads).chunk(2, 1)
        gains = q_gain, k_gain
        return write_heads(q, k, v, *gains, eps, k_pages, v_pages, page_tags, *stamps, None, None, None, threads)
    assert k_pages.stride() == v_pages.stride()
    assert rows.is_contiguous(), rows.stride()
    assert q.stride(1) == kv.stride(1) == k_pages.stride(3) == 1
    out = torch.empty((tokens, columns), dtype=k_pages.dtype, device=q.device)
    _, tile_rows, num_warps = norm_tile(width)
    launch(
        convolve_heads_kernel, (programs_of(tokens, num_rows, heads, kv_heads, tile_rows),),
        kv, taps, rows, row_tags, *index, q, q_gain, k_gain, out, k_pages, v_pages, page_tags, *stamps, tokens, num_rows,
        entry_tag.shape[0], kv.stride(0), eps, TAPS=history + 1, Q_STRIDE=q.stride(0), PAGE_STRIDE=k_pages.stride(0),
        HEAD_STRIDE=k_pages.stride(1), ROW_STRIDE=k_pages.stride(2), PAGE_SIZE=page_size, HEADS=heads, KV_HEADS=kv_heads,
        WIDTH=width, IS_SPARSE=tokens <= history * num_rows, ROWS=tile_rows,
        BLOCK_K=tile_of(tokens, num_rows, width).tokens,
        BLOCK_H=triton.next_power_of_2(history), SCAN=SCAN, ROW_BLOCK=ROW_BLOCK, num_warps=num_warps,
        maxnreg=NORMED_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
