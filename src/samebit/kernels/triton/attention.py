"""Attention over paged keys: one path for prefill, decode and the verification of guesses.

A tile has query rows of one KV head: tokens of a batch row, each under all of its query heads. What a query row comes to depends on
absolute positions alone: keys are taken in blocks and chunks, both aligned (``Tiling``, softmax.py). So neither the
height of a tile nor whether the chunks are walked by one program or by several, the last of which merges them, changes bits.
Pages that no query row of a tile sees are not read. A value that is not finite can reach the query rows of its tile, all of one
sequence. Knows no layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.bias import most_rows, relative_bias, table_shape
from samebit.kernels.triton.items import INDEX, find_row, row_items, row_sizes, value_of
from samebit.kernels.triton.last import MAX_COUNTERS, counters
from samebit.kernels.triton.launch import dot_dtype, launch, num_programs, shared_memory
from samebit.kernels.triton.merging import share_tile, store_tile
from samebit.kernels.triton.softmax import LOG2_E, add_keys, add_run, no_keys

SHORT_BLOCK_M = 16
"""Query rows of a tile where a batch row has few."""
SEVERAL_ROWS = 16
"""Batch rows that a program looks through at once, at least, where there is more than one."""
NO_WINDOW = 2**30
"""Longer than any sequence."""
MAX_WIDTH = 256
"""Columns of the widest head."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is cut, and how kernels are compiled. ``block_n`` and the chunks fix the order of sums; the rest changes no bits.

    A layer's keys are summed in chunks of ``window_chunk`` if it has a window or rows are blocks of guesses, else of ``chunk``; both are
    multiples of ``block_n``.
    Batch rows of at most ``short_rows`` query rows for each KV head have tiles of 16; of these, rows are split by chunks that have
    more than ``split_above`` times as many as fall to a program, while there are at most ``max_partials`` partial results of
    tiles, each of 16 * (head width + 2) floats. Others have tiles of ``long_block_m``, or less where a token has few query rows.
    ``short_programs`` and ``long_programs`` are those of a multiprocessor. Found by benchmarks/tiles.py.
    """

    block_n: int = 64
    chunk: int = 256
    window_chunk: int = 128
    short_rows: int = 64
    split_above: int = 2
    max_partials: int = 4096
    long_block_m: int = 128
    short_warps: int = 4
    short_stages: int = 3
    short_programs: int = 4
    long_warps: int = 8
    long_stages: int = 3
    long_programs: int = 8

    def chunk_of(self, window: int, block_tokens: int) -> int:
        """Keys of a chunk."""
        return self.window_chunk if window or block_tokens else self.chunk

    def long_tile(self, width: int, d_rel: int, group: int, itemsize: int, room: int) -> tuple[int, int]:
        """Query rows and stages of long tiles: the most that `room` bytes of shared memory hold, and two stages rather than many rows."""
        rows = [self.long_block_m >> halvings for halvings in range(3)]
        many = [(m, stages) for m in rows for stages in range(self.long_stages, 1, -1)]
        tiles = [*many, *((m, 1) for m in rows)]
        fitting = (tile for tile in tiles if shared_bytes(*tile, self.block_n, width, d_rel, group, itemsize) <= room)
        return next(fitting, tiles[-1])


def shared_bytes(block_m: int, stages: int, block_n: int, width: int, d_rel: int, group: int, itemsize: int) -> int:
    """Shared memory of a long tile, as the compiler has it: a stage's keys, values and profile, queries, their features and bias."""
    span = 0
    if d_rel:
        block_m = min(block_m, most_rows(group, block_n))
        span = table_shape(d_rel, group, block_m, block_n)["SPAN"]
    stage = 2 * block_n * width + d_rel * span
    return itemsize * (stages * stage + block_m * (width + d_rel)) + 4 * block_m * span + 2048


TILINGS = {
    torch.bfloat16: Tiling(),
    torch.float32: Tiling(block_n=32, short_warps=8, short_stages=1, long_block_m=32, long_stages=1),
}
"""By the dtype of the pages."""


@triton.jit
def pages_of(table, keys, are_wanted, PAGE_SIZE: tl.constexpr):
    """The pages of keys, whose positions are not negative."""
    return tl.load(table + keys.to(tl.uint32) // PAGE_SIZE, mask=are_wanted, other=0)


@triton.jit
def own_keys(
    own_k, own_v, query, temperature, first, place, is_query, head, window, num_blocks,
    SCALE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    OWN_K_STRIDE: tl.constexpr, OWN_V_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What query rows see of the keys of their own batch row's BLOCK_TOKENS tokens, as one chunk."""
    column = tl.arange(0, BLOCK_D)
    is_column = column < WIDTH
    top, total, sums = no_keys(BLOCK_M, BLOCK_D)
    for block in tl.range(num_blocks, num_stages=1):
        other = block * BLOCK_N + tl.arange(0, BLOCK_N)
        wanted = (other < BLOCK_TOKENS)[:, None] & is_column[None, :]
        own = (first + other).to(tl.int64)[:, None]
        at = head * WIDTH + column[None, :]
        keys = tl.load(own_k + own * OWN_K_STRIDE + at, mask=wanted, other=0.0).to(DOT)
        values = tl.load(own_v + own * OWN_V_STRIDE + at, mask=wanted, other=0.0).to(DOT)
        distance = place[:, None] - other[None, :]
        seen = (other < BLOCK_TOKENS)[None, :] & is_query[:, None] & (tl.abs(distance) < window)
        if IS_CAUSAL:
            seen = seen & (distance >= 0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
        top, total, sums = add_keys(top, total, sums, scores * temperature[:, None], seen, values, DOT)
    return top, total, sums


@triton.jit(do_not_specialize=[*INDEX, "row_slots", "page_table", "num_tokens", "table_width"])
def attend_kernel(
    q,
    rel,
    rel_proj,
    tau,
    own_k,  # keys and values in no page, of rows of BLOCK_TOKENS tokens each
    own_v,
    k_pages,
    v_pages,
    query_start,
    row_start,
    row_slots,
    page_table,
    out,
    partial_sums,
    partial_scales,
    counter,
    num_rows,
    num_tokens,
    table_width,
    window,
    capacity,
    programs,
    SCALE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_REL: tl.constexpr,
    EXTENT: tl.constexpr,
    HAS_FAR: tl.constexpr,  # whether the window is longer
    BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGN: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    REL_STRIDE: tl.constexpr,
    OWN_K_STRIDE: tl.constexpr,
    OWN_V_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    SPLIT_ABOVE: tl.constexpr,
    IS_LONG: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DOT: tl.constexpr,
):
    batch_row = tl.arange(0, BLOCK_B)
    slots = tl.load(row_slots + batch_row, mask=batch_row < num_rows, other=0)
    ends, is_split, first_partial = row_items(
        query_start, row_start, num_rows, window, capacity, programs, BLOCK_TOKENS, CHUNK, GROUP, KV_HEADS, BLOCK_M,
        SHORT_ROWS, SPLIT_ABOVE, IS_LONG, BLOCK_B,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    is_column = column < WIDTH
    scale = tl.full((BLOCK_M, BLOCK_N), SCALE, tl.float32)
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        row, first_item = find_row(ends, item)
        first, count, start, first_chunk, chunks = row_sizes(
            query_start, row_start, row, num_rows, window, BLOCK_TOKENS, CHUNK
        )
        table = page_table + value_of(slots, row, BLOCK_B).to(tl.int64) * table_width
        split = False if IS_LONG else value_of(is_split, row, BLOCK_B) > 0
        local = item - first_item
        parts = tl.where(split, chunks, 1)
        part, piece = local % parts, local // parts
        head = piece % KV_HEADS
        # The last tiles of a row see the most keys: they begin first.
        tile = tl.cdiv(count * GROUP, BLOCK_M) - 1 - piece // KV_HEADS

        query_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        place = query_row // GROUP
        is_query = place < count
        token = (first + place).to(tl.int64)
        query_head = head * GROUP + query_row % GROUP
        position = start + place
        low_place = tile * BLOCK_M // GROUP
        low = tl.maximum(start + low_place - window + 1, 0)
        if BLOCK_TOKENS > 0:
            high = start
            last_seen = tl.full((BLOCK_M,), 0, tl.int32) + (start - 1)
        else:
            high = start + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP + 1, count)
            last_seen = position
        unseen = position - window
        origin = (first_chunk + part) * CHUNK
        first_block = tl.where(split, tl.maximum(low, origin), low) // BLOCK_N
        end_block = tl.cdiv(tl.where(split, tl.minimum(high, origin + CHUNK), high), BLOCK_N)

        # The pages of a block are asked for a block ahead, and the first ones before the query is waited for.
        next_key = first_block * BLOCK_N + tl.arange(0, BLOCK_N)
        page = pages_of(table, next_key, (next_key >= low) & (next_key < high), PAGE_SIZE)
        query = tl.load(
            q + (token * Q_STRIDE + query_head * WIDTH)[:, None] + column[None, :],
            mask=is_query[:, None] & is_column[None, :],
            other=0.0,
        ).to(DOT)
        if D_REL > 0:
            temperature = tl.load(tau + token, mask=is_query, other=0.0) * LOG2_E
            feature = tl.arange(0, BLOCK_R)[None, :]
            features = tl.load(
                rel + (token * REL_STRIDE + query_head * D_REL)[:, None] + feature,
                mask=is_query[:, None] & (feature < D_REL),
                other=0.0,
            ).to(DOT)
            near_block = tl.maximum(start + low_place - EXTENT + 1, 0) // BLOCK_N
            near_block = tl.minimum(tl.maximum(near_block, first_block), end_block)
        else:
            temperature = tl.full((BLOCK_M,), LOG2_E, tl.float32)
            near_block = end_block

        top, total, sums = no_keys(BLOCK_M, BLOCK_D)
        chunk_top, chunk_total, chunk_sums = no_keys(BLOCK_M, BLOCK_D)
        # First the keys that are too far away for a bias, if there can be any.
        for has_bias in tl.static_range(0 if HAS_FAR or D_REL == 0 else 1, 2 if D_REL > 0 else 1):
            begin_block = near_block if has_bias else first_block
            stop_block = end_block if has_bias else near_block
            for block in range(begin_block, stop_block):
                key = block * BLOCK_N + tl.arange(0, BLOCK_N)
                is_key = (key >= low) & (key < high)
                where = (
                    page.to(tl.int64) * PAGE_STRIDE + head * HEAD_STRIDE + key.to(tl.uint32) % PAGE_SIZE * ROW_STRIDE
                )
                page = pages_of(table, key + BLOCK_N, key + BLOCK_N < high, PAGE_SIZE)
                at = where[:, None] + column[None, :]
                wanted = is_key[:, None] & is_column[None, :]
                if has_bias:
                    nearest = start + low_place - (block * BLOCK_N + BLOCK_N - 1)
                    bias = relative_bias(
                        features, rel_proj, place - low_place, nearest, D_REL, EXTENT, BLOCK_R, SPAN, ALIGN, BLOCK_N, DOT
                    )  # fmt: skip
                keys = tl.load(k_pages + at, mask=wanted, other=0.0).to(DOT)
                scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
                scores = tl.fma(scores, scale, bias) if has_bias else scores * SCALE
                seen = (key[None, :] <= last_seen[:, None]) & (key[None, :] > unseen[:, None])
                values = tl.load(v_pages + at, mask=wanted, other=0.0).to(DOT)
                chunk_top, chunk_total, chunk_sums = add_keys(
                    chunk_top, chunk_total, chunk_sums, scores * temperature[:, None], seen, values, DOT
                )
                if (block + 1) % (CHUNK // BLOCK_N) == 0:
                    top, total, sums = add_run(top, total, sums, chunk_top, chunk_total, chunk_sums)
                    chunk_top, chunk_total, chunk_sums = no_keys(BLOCK_M, BLOCK_D)
        top, total, sums = add_run(top, total, sums, chunk_top, chunk_total, chunk_sums)
        if BLOCK_TOKENS > 0:
            # The rows' own keys are their last chunk.
            own_blocks = tl.where(part == parts - 1, tl.cdiv(BLOCK_TOKENS, BLOCK_N), 0)
            chunk_top, chunk_total, chunk_sums = own_keys(
                own_k, own_v, query, temperature, first, place, is_query, head, window, own_blocks,
                SCALE, BLOCK_TOKENS, IS_CAUSAL, WIDTH, OWN_K_STRIDE, OWN_V_STRIDE, BLOCK_M, BLOCK_N, BLOCK_D, DOT,
            )  # fmt: skip
            top, total, sums = add_run(top, total, sums, chunk_top, chunk_total, chunk_sums)

        weight = tl.max(total, 1)  # all columns are equal
        if split:
            share_tile(
                out, partial_sums, partial_scales, counter, value_of(first_partial, row, BLOCK_B) + local, part, parts,
                sums, weight, top, first, count, tile, head, GROUP, KV_HEADS, WIDTH, BLOCK_M,
            )  # fmt: skip
        else:
            store_tile(out, sums, weight, first, count, tile, head, GROUP, KV_HEADS, WIDTH, BLOCK_M)

    if BLOCK_TOKENS == 0 and not IS_LONG:
        # Padding belongs to no row.
        for token in range(tl.load(query_start + num_rows) + tl.program_id(0), num_tokens, tl.num_programs(0)):
            for query_head in range(KV_HEADS * GROUP):
                at = (token * KV_HEADS * GROUP + query_head) * WIDTH + column
                tl.store(out + at, tl.zeros((BLOCK_D,), out.dtype.element_ty), mask=is_column)


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose queries attend to what: fields of AttnIndex, or of BlockIndex with ``block_tokens`` and the blocks' own keys and values.

    No row has more than ``longest`` tokens, and each as many as a block.
    """

    query_start: Tensor
    row_start: Tensor
    row_slots: Tensor
    page_table: Tensor
    longest: int
    block_tokens: int
    is_causal: bool
    own_k: Tensor
    own_v: Tensor


def attend(
    q: Tensor,
    rel: Tensor,
    rel_proj: Tensor,
    tau: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
    window: int,
    scale: float,
    tiling: Tiling,
) -> Tensor:
    """[T, nh * hd] in the pages' dtype; without a bias where ``rel_proj`` has no rows."""
    assert k_pages.stride() == v_pages.stride()
    assert q.stride(1) == rel.stride(1) == k_pages.stride(3) == 1
    _, kv_heads, page_size, width = k_pages.shape
    num_tokens, num_rows, table_width = q.shape[0], rows.row_start.shape[0], rows.page_table.shape[1]
    group, d_rel = q.shape[1] // width // kv_heads, rel_proj.shape[0]
    out = torch.empty(num_tokens, q.shape[1], dtype=k_pages.dtype, device=q.device)
    block_d = max(16, triton.next_power_of_2(width))
    chunk, programs = tiling.chunk_of(window, rows.block_tokens), num_programs(q.device, tiling.short_programs)
    assert chunk % tiling.block_n == 0
    most_keys = min(table_width * page_size, window + tiling.short_rows if window else NO_WINDOW)
    most_chunks = triton.cdiv(most_keys, chunk) + bool(window) + bool(rows.block_tokens)
    # Where rows are enough for all programs, none has so many keys in its window that it should be split.
    can_split = most_chunks > 1 and not (window and num_rows * kv_heads >= programs and tiling.split_above)
    most_tiles = min(num_tokens, num_rows * triton.cdiv(tiling.short_rows, SHORT_BLOCK_M)) if can_split else 0
    capacity = min(tiling.max_partials, most_tiles * kv_heads * most_chunks)
    assert capacity <= MAX_COUNTERS
    partial_sums = torch.empty(capacity, SHORT_BLOCK_M, block_d, dtype=torch.float32, device=q.device)
    partial_scales = torch.empty(capacity, SHORT_BLOCK_M, 2, dtype=torch.float32, device=q.device)

    def launch_attend(*, is_long: bool) -> None:
        block_m, num_stages = SHORT_BLOCK_M, tiling.short_stages
        if is_long:
            room = shared_memory(q.device)
            block_m, num_stages = tiling.long_tile(width, d_rel, group, k_pages.element_size(), room)
        if is_long and d_rel:
            block_m = min(block_m, most_rows(group, tiling.block_n))
        launch(
            attend_kernel, (num_programs(q.device, tiling.long_programs) if is_long else programs,),
            q, rel, rel_proj, tau, rows.own_k, rows.own_v, k_pages, v_pages, rows.query_start, rows.row_start,
            rows.row_slots, rows.page_table, out, partial_sums, partial_scales, counters(q.device), num_rows, num_tokens,
            table_width, window or NO_WINDOW, 0 if is_long else capacity, programs,
            SCALE=scale, BLOCK_TOKENS=rows.block_tokens, IS_CAUSAL=rows.is_causal, GROUP=group, KV_HEADS=kv_heads,
            WIDTH=width, D_REL=d_rel, EXTENT=rel_proj.shape[1], HAS_FAR=not 0 < window <= rel_proj.shape[1],
            Q_STRIDE=q.stride(0), REL_STRIDE=rel.stride(0),
            OWN_K_STRIDE=rows.own_k.stride(0), OWN_V_STRIDE=rows.own_v.stride(0), PAGE_STRIDE=k_pages.stride(0),
            HEAD_STRIDE=k_pages.stride(1), ROW_STRIDE=k_pages.stride(2), PAGE_SIZE=page_size,
            BLOCK_M=block_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d, CHUNK=chunk,
            SHORT_ROWS=tiling.short_rows, SPLIT_ABOVE=tiling.split_above, IS_LONG=is_long,
            BLOCK_B=max(1 if num_rows == 1 else SEVERAL_ROWS, triton.next_power_of_2(num_rows)), DOT=dot_dtype(k_pages.dtype),
            **table_shape(d_rel, group, block_m, tiling.block_n),
            num_warps=tiling.long_warps if is_long else tiling.short_warps,
            num_stages=num_stages, enable_fp_fusion=False,
        )  # fmt: skip

    if rows.longest * group > tiling.short_rows:
        launch_attend(is_long=True)
    if rows.block_tokens * group <= tiling.short_rows:
        launch_attend(is_long=False)
    return out


def attention(
    q: Tensor,
    rel: Tensor,
    rel_proj: Tensor,
    tau: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_start: Tensor,
    row_start: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    longest: int,
    window: int,
    scale: float,
    threads: int,
) -> Tensor:
    """See ``KernelSet.attention``; ``q``, ``rel`` and ``rel_proj`` are rounded to the pages' dtype, which the result has."""
    rows = Rows(query_start, row_start, row_slots, page_table, longest, 0, True, q, q)
    return attend(q, rel, rel_proj, tau, k_pages, v_pages, rows, window, scale, TILINGS[k_pages.dtype])
