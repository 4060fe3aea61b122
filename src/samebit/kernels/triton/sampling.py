"""Sampling: one program per row of logits, which reads nothing but its own row and settings.

A row is walked in blocks; what is added up is added as integers, so that no block size or thread changes a bit. The
noise is that of ``samebit.kernels.noise``, computed in fp64. Knows nothing of requests or stop rules.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.filters import (
    LOWEST,
    MAX_VOCAB,
    UNITS,
    last_kept,
    load_row,
    load_scaled,
    mass,
    place,
    token_at,
    value,
)
from samebit.kernels.triton.launch import launch

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position", "target")
_RESULTS = ("tokens", "logprobs", "ranks", "finite")


def _config(vocab: int) -> dict[str, Any]:
    """Columns per block and warps, by vocabulary. They change no bits."""
    if vocab > 1024:
        return {"BLOCK": 4096, "NARROW": 1024, "num_warps": 16}
    return {"BLOCK": 256, "NARROW": 256, "num_warps": 2}


@triton.jit
def _survey(row, V: tl.constexpr, BLOCK: tl.constexpr):
    """The place of the likeliest token, and whether every logit is finite."""
    best = tl.full([BLOCK], LOWEST, tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_row(row, ids, V)
        best = tl.maximum(best, place(x, ids, V))
        exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
        bad |= ((exponent == 0x7F800000) & (ids < V)).to(tl.int32)
    return tl.max(best), tl.max(bad) == 0


@triton.jit
def _log_total(row, top, V: tl.constexpr, BLOCK: tl.constexpr):
    """log(sum(exp(logits - top))) in fp32."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, V, BLOCK):
        sums += mass(load_row(row, start + tl.arange(0, BLOCK), V), top)
    return tl.log(tl.sum(sums).to(tl.float64) / UNITS).to(tl.float32)


@triton.jit
def _rank(row, chosen, V: tl.constexpr, BLOCK: tl.constexpr):
    """1 + the number of tokens before a place."""
    ahead = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        ahead += (place(load_row(row, ids, V), ids, V) > chosen).to(tl.int32)
    return 1 + tl.sum(ahead)


@triton.jit
def gumbel(seed, sample_index, position, start, BLOCK: tl.constexpr):
    """The noise of tokens ``start``, a multiple of 4, to ``start + BLOCK``: fp32, rounded from fp64."""
    group = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position.to(tl.uint32), zero + sample_index.to(tl.uint32), zero)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = ((word >> 9).to(tl.float64) + 0.5) * (2.0**-23)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _draw(row, heat, last, seed, sample_index, position, V: tl.constexpr, BLOCK: tl.constexpr):
    """The token with the largest noisy score among those down to place ``last``."""
    best = tl.full([BLOCK], LOWEST, tl.int64)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_scaled(row, ids, heat, V)
        is_kept = place(x, ids, V) >= last
        if tl.max(is_kept.to(tl.int32)) > 0:
            noisy = place(x + gumbel(seed, sample_index, position, start, BLOCK), ids, V)
            best = tl.maximum(best, tl.where(is_kept, noisy, LOWEST))
    return token_at(tl.max(best), V)


@triton.jit(do_not_specialize_on_alignment=[*_COLUMNS, *_RESULTS])
def sample_kernel(
    logits, stride, temperature, top_k, top_p, min_p, seed, sample_index, position, target,
    tokens, logprobs, ranks, finite, V: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = logits + at.to(tl.int64) * stride
    best, is_finite = _survey(row, V, BLOCK)
    tl.store(finite + at, is_finite.to(tl.int8))
    if is_finite:
        heat, wanted = tl.load(temperature + at), tl.load(target + at)
        top = value((best >> 32).to(tl.int32))
        token = token_at(best, V)
        if wanted >= 0:
            token = wanted
        elif heat > 0:
            k, p, least = tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at)
            last = tl.full([], LOWEST + 1, tl.int64)
            if ((k > 0) & (k < V)) | (p < 1) | (least > 0):
                last = last_kept(row, heat, tl.div_rn(top, heat), k, p, least, V, BLOCK, NARROW)
            draw, which, where = tl.load(seed + at), tl.load(sample_index + at), tl.load(position + at)
            token = _draw(row, heat, last, draw, which, where, V, BLOCK)
        x = tl.load(row + token, mask=token < V, other=0.0)
        tl.store(tokens + at, token)
        tl.store(logprobs + at, x - top - _log_total(row, top, V, BLOCK))
        tl.store(ranks + at, _rank(row, place(x, token, V), V, BLOCK))
    else:
        tl.store(tokens + at, 0)
        tl.store(logprobs + at, 0.0)
        tl.store(ranks + at, 1)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids", "logprobs"])
def top_kernel(logits, stride, n, ids, logprobs, V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Keeps each block's best place; taking one token changes its own block's only."""
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    blocks = tl.arange(0, BLOCKS)
    best = tl.full([BLOCKS], LOWEST, tl.int64)
    for start in tl.range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        places = place(load_row(row, columns, V), columns, V)
        best = tl.where(blocks == start // BLOCK, tl.max(places), best)
    top = value((tl.max(best) >> 32).to(tl.int32))
    total = _log_total(row, top, V, BLOCK)
    for i in range(n):
        chosen = tl.max(best)
        token = token_at(chosen, V)
        tl.store(ids + at * n + i, token)
        tl.store(logprobs + at * n + i, value((chosen >> 32).to(tl.int32)) - top - total)
        columns = token // BLOCK * BLOCK + tl.arange(0, BLOCK)
        places = place(load_row(row, columns, V), columns, V)
        left = tl.max(tl.where(places < chosen, places, LOWEST))
        best = tl.where(blocks == token // BLOCK, left, best)


def _check(logits: Tensor) -> tuple[int, int]:
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"the sampler adds up at most {MAX_VOCAB} tokens, got {vocab}")
    return rows, vocab


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    target: Tensor,
    threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``KernelSet.sample``. A target that is no token is not found out: that would wait for the device."""
    rows, vocab = _check(logits)
    tokens, ranks = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    launch(
        sample_kernel, (rows,), logits, logits.stride(0), temperature, top_k, top_p, min_p, seed, sample_index,
        position, target, tokens, logprobs, ranks, finite.view(torch.int8), V=vocab, **_config(vocab),
    )  # fmt: skip
    return tokens, logprobs, ranks, finite


def top_logprobs(logits: Tensor, n: int, threads: int) -> tuple[Tensor, Tensor]:
    """``KernelSet.top_logprobs``; at most as many as there are tokens."""
    rows, vocab = _check(logits)
    n = min(n, vocab)
    ids = torch.empty(rows, n, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, n, dtype=torch.float32, device=logits.device)
    block, warps = (_config(vocab)[name] for name in ("BLOCK", "num_warps"))
    blocks = triton.next_power_of_2(triton.cdiv(vocab, block))
    launch(
        top_kernel, (rows,), logits, logits.stride(0), n, ids, logprobs, V=vocab, BLOCK=block, BLOCKS=blocks,
        num_warps=warps,
    )  # fmt: skip
    return ids, logprobs
