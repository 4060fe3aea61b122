"""Rows picked, joined and put in order on a device: the twin is kernels/torch_words.py. Each element is written once, from its own.

What torch needs a launch or several for each is one launch. Knows no model and no drafter.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.index import jit_once
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.rows import COLUMNS
from samebit.kernels.values import DraftWords

ROW_BLOCK = 32
"""Rows that guess, of a program."""
BYTE_BLOCK = 1024
"""Bytes of a program."""
_ENDS = [f"end_{i}" for i in range(12)]
MAX_PARTS = len(_ENDS)
"""Runs of bytes that are joined at most."""


@triton.jit
def spread(setting, sample, column, is_row, there):
    """Each row's setting, into all of its places in a column of guesses."""
    tl.store(column, tl.load(setting + sample, mask=is_row, other=0)[:, None], mask=there)


@jit_once
def draft_words_kernel(
    slots, samples, length, next_token, temperature, top_k, top_p, min_p, seed, sample_index,
    lengths, last_tokens, to_temperature, to_top_k, to_top_p, to_min_p, to_seed, to_sample_index, to_position,
    token_ids, positions,
    num_rows, filler,
    DRAFTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each row guesses by, its DRAFTS places in every column, and its block of TOKENS."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot, sample = tl.load(slots + row, mask=is_row, other=0), tl.load(samples + row, mask=is_row, other=0)
    start = tl.load(length + slot, mask=slot > 0, other=0)
    last = tl.load(next_token + slot, mask=slot > 0, other=0)
    tl.store(lengths + row, start.to(tl.int32), mask=is_row)
    tl.store(last_tokens + row, last, mask=is_row)
    k = tl.arange(0, BLOCK_K)[None, :]
    at, there = k * num_rows + row[:, None], is_row[:, None] & (k < DRAFTS)
    spread(temperature, sample, to_temperature + at, is_row, there)
    spread(top_k, sample, to_top_k + at, is_row, there)
    spread(top_p, sample, to_top_p + at, is_row, there)
    spread(min_p, sample, to_min_p + at, is_row, there)
    spread(seed, sample, to_seed + at, is_row, there)
    spread(sample_index, sample, to_sample_index + at, is_row, there)
    position = start[:, None] + k
    tl.store(to_position + at, position + 1, mask=there)
    at, there = row[:, None] * TOKENS + k, is_row[:, None] & (k < TOKENS)
    tl.store(token_ids + at, tl.where(k == 0, last[:, None], filler), mask=there)
    tl.store(positions + at, position, mask=there)


def draft_words(
    slots: Tensor,
    samples: Tensor,
    length: Tensor,
    next_token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    words: list[Tensor],
    filler: int,
) -> None:
    """``KernelSet.draft_words``."""
    to, num_rows = DraftWords(*words), slots.shape[0]
    drafts, tokens = to.position.shape[0], to.token_ids.shape[1]
    launch(
        draft_words_kernel,
        (triton.cdiv(num_rows, ROW_BLOCK),),
        slots, samples, length, next_token, temperature, top_k, top_p, min_p, seed, sample_index, *to, num_rows, filler,
        DRAFTS=drafts, TOKENS=tokens, BLOCK_K=triton.next_power_of_2(max(1, drafts, tokens)), BLOCK=ROW_BLOCK,
    )  # fmt: skip


@jit_once
def keep_drafts_kernel(
    tokens, slots, drafts, kept, num_rows, row_stride, token_stride, slot_stride,
    DRAFTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Guesses of rows, to their slots and to a dense copy."""
    row, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    row, slot = row[:, None], slot[:, None]
    there = (row < num_rows) & (k < DRAFTS)
    token = tl.load(tokens + row * row_stride + k * token_stride, mask=there, other=0)
    tl.store(kept + row * DRAFTS + k, token, mask=there)
    tl.store(drafts + slot * slot_stride + k, token, mask=there & (slot > 0))


def keep_drafts(tokens: Tensor, slots: Tensor, drafts: Tensor) -> Tensor:
    """``KernelSet.keep_drafts``, but that slot 0 takes nothing. Tokens may lie in any order."""
    (num_rows, count), kept = tokens.shape, torch.empty(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    assert drafts.stride(1) == 1, drafts.stride()
    launch(
        keep_drafts_kernel,
        (triton.cdiv(num_rows, ROW_BLOCK),),
        tokens, slots, drafts, kept, num_rows, *tokens.stride(), drafts.stride(0),
        DRAFTS=count, BLOCK_D=triton.next_power_of_2(max(1, count)), BLOCK=ROW_BLOCK,
    )  # fmt: skip
    return kept


@triton.jit(do_not_specialize=["divisor"], do_not_specialize_on_alignment=["rows"])
def take_rows_kernel(x, rows, out, x_stride, divisor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a row that is wanted, divided."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    values = tl.load(x + tl.load(rows + row) * x_stride + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, tl.div_rn(values, tl.zeros_like(values) + divisor), mask=there)


def take_rows(x: Tensor, rows: Tensor, divisor: float) -> Tensor:
    """``KernelSet.take_rows``; rows of ``x`` may lie apart, and those wanted must be there."""
    assert x.stride(1) == 1, x.stride()
    (count,), width = rows.shape, x.shape[1]
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(
        take_rows_kernel,
        (count * triton.cdiv(width, block),),
        x, rows, out, x.stride(0), divisor,
        WIDTH=width, BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit
def joined_sums_kernel(x, y, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a token's sum of one pair, into the columns of that pair."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there, pair = column < WIDTH, tl.program_id(1)
    for i in tl.static_range(len(x)):
        if pair == i:
            one = tl.load(x[i] + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
            other = tl.load(y[i] + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
            tl.store(out + (token * len(x) + i) * WIDTH + column, one + other, mask=there)


def joined_sums(activation: torch.dtype, x: list[Tensor], y: list[Tensor]) -> Tensor:
    """``KernelSet.joined_sums`` of dense tensors of any float dtypes."""
    for one in (*x, *y):
        assert one.shape == x[0].shape, (one.shape, x[0].shape)
        assert one.is_contiguous(), one.stride()
    tokens, width = x[0].shape
    out = torch.empty((tokens, len(x) * width), dtype=activation, device=x[0].device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    grid = (tokens * triton.cdiv(width, block), len(x))
    launch(joined_sums_kernel, grid, tuple(x), tuple(y), out, WIDTH=width, BLOCK=block)
    return out


@triton.jit(do_not_specialize=_ENDS)
def joined_bytes_kernel(
    parts,
    out,
    end_0,
    end_1,
    end_2,
    end_3,
    end_4,
    end_5,
    end_6,
    end_7,
    end_8,
    end_9,
    end_10,
    end_11,
    BLOCK: tl.constexpr,
):
    """A part of the whole: every byte is in one of ``parts``, of which the i-th ends where ``end_i`` says."""
    ends = (end_0, end_1, end_2, end_3, end_4, end_5, end_6, end_7, end_8, end_9, end_10, end_11)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found, start = tl.zeros([BLOCK], tl.uint8), 0
    for i in tl.static_range(len(parts)):
        found |= tl.load(parts[i] + at - start, mask=(at >= start) & (at < ends[i]), other=0)
        start = ends[i]
    tl.store(out + at, found, mask=at < start)


def joined_bytes(parts: list[Tensor]) -> Tensor:
    """``KernelSet.joined_bytes``, of at most MAX_PARTS."""
    assert len(parts) <= MAX_PARTS, len(parts)
    ends = list(itertools.accumulate(part.shape[0] for part in parts))
    out = torch.empty(ends[-1], dtype=torch.uint8, device=parts[0].device)
    ends += [0] * (MAX_PARTS - len(ends))
    launch(joined_bytes_kernel, (triton.cdiv(out.shape[0], BYTE_BLOCK),), tuple(parts), out, *ends, BLOCK=BYTE_BLOCK)
    return out


def implementations(activation: torch.dtype) -> dict[str, Callable[..., Any]]:
    """These kernels for activations of this dtype, with the arguments of the operators."""
    return {
        "draft_words": draft_words,
        "keep_drafts": keep_drafts,
        "take_rows": take_rows,
        "joined_bytes": joined_bytes,
        "joined_sums": partial(joined_sums, activation),
    }
