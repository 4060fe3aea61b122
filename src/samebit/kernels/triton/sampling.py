"""Sampling: a row of logits has programs of its own, which read nothing but the row and its settings.

A row is walked in blocks. Where rows are few, several programs share what is computed in fp64, the likelihoods and the noise, and the one
that finishes last goes on. What is added up is added as integers, so that no block size, thread or share changes a bit. The noise is
that of ``samebit.kernels.noise``. Knows nothing of requests or stop rules.
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
from samebit.kernels.triton.last import PAST_L1, counters, is_last
from samebit.kernels.triton.launch import launch

FEW_ROWS, MOST_SHARES = 16, 8
"""Up to so many rows, so many programs share a row: one for each multiprocessor of a Hopper device."""
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
def _mass(row, top, first, end, V: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of tokens ``first`` to ``end``, multiples of a block, relative to the likeliest one's."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(first, end, BLOCK):
        sums += mass(load_row(row, start + tl.arange(0, BLOCK), V), top)
    return tl.sum(sums)


@triton.jit
def _log_total(mass):
    """log(sum(exp(logits - top))) in fp32, of the mass of all tokens."""
    return tl.log(mass.to(tl.float64) / UNITS).to(tl.float32)


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
def _draw(row, heat, last, seed, sample_index, position, first, end, V: tl.constexpr, BLOCK: tl.constexpr):
    """The place, by noisy scores, of the best of tokens ``first`` to ``end`` down to place ``last``; LOWEST if there are none."""
    best = tl.full([BLOCK], LOWEST, tl.int64)
    for start in tl.range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_scaled(row, ids, heat, V)
        is_kept = place(x, ids, V) >= last
        if tl.max(is_kept.to(tl.int32)) > 0:
            noisy = place(x + gumbel(seed, sample_index, position, start, BLOCK), ids, V)
            best = tl.maximum(best, tl.where(is_kept, noisy, LOWEST))
    return tl.max(best)


@triton.jit(do_not_specialize_on_alignment=[*_COLUMNS, *_RESULTS])
def sample_kernel(
    logits, stride, temperature, top_k, top_p, min_p, seed, sample_index, position, target,
    tokens, logprobs, ranks, finite, shares, counter,
    V: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr, SHARES: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """SHARES programs for each row, each of which takes SHARE tokens; ``shares`` [2, rows, SHARES] int64 are masses and best places.

    Without ``logprobs`` only ``tokens`` are wanted.
    """
    IS_SCORED: tl.constexpr = logprobs is not None
    at, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    row, num_rows = logits + at.to(tl.int64) * stride, tl.num_programs(0) // SHARES
    best, is_finite = _survey(row, V, BLOCK)
    if IS_SCORED:
        tl.store(finite + at, is_finite.to(tl.int8))
    if is_finite:
        heat, wanted = tl.load(temperature + at), tl.load(target + at)
        top, first = value((best >> 32).to(tl.int32)), share * SHARE
        end = tl.minimum(first + SHARE, V)
        is_drawn = (wanted < 0) & (heat > 0)
        if is_drawn:
            k, p, least = tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at)
            last = tl.full([], LOWEST + 1, tl.int64)
            if ((k > 0) & (k < V)) | (p < 1) | (least > 0):
                last = last_kept(row, heat, tl.div_rn(top, heat), k, p, least, V, BLOCK, NARROW)
            draw, which, where = tl.load(seed + at), tl.load(sample_index + at), tl.load(position + at)
            best = _draw(row, heat, last, draw, which, where, first, end, V, BLOCK)
        if IS_SCORED:
            total = _mass(row, top, first, end, V, BLOCK)
        is_ready = True
        if SHARES > 1:
            own, all_shares = shares + at * SHARES, tl.arange(0, SHARES)
            if IS_SCORED:
                tl.store(own + share, total)
            tl.store(own + num_rows * SHARES + share, best)
            is_ready = is_last(counter + at, SHARES)
            if IS_SCORED:
                total = tl.sum(tl.load(own + all_shares, cache_modifier=PAST_L1))
            best = tl.max(tl.load(own + num_rows * SHARES + all_shares, cache_modifier=PAST_L1))
        if is_ready:
            token = token_at(best, V)
            if wanted >= 0:
                token = wanted
            tl.store(tokens + at, token)
            if IS_SCORED:
                x = tl.load(row + token, mask=token < V, other=0.0)
                tl.store(logprobs + at, x - top - _log_total(total))
                tl.store(ranks + at, _rank(row, place(x, token, V), V, BLOCK))
    else:
        tl.store(tokens + at, 0)
        if IS_SCORED:
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
    total = _log_total(_mass(row, top, 0, V, V, BLOCK))
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
    rows = logits.shape[0]
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    settings = temperature, top_k, top_p, min_p, seed, sample_index, position, target
    return _launch(logits, settings, logprobs, ranks, finite.view(torch.int8)), logprobs, ranks, finite


def draw(
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
) -> Tensor:
    """``KernelSet.draw``: ``sample`` without what tokens are scored by."""
    return _launch(logits, (temperature, top_k, top_p, min_p, seed, sample_index, position, target), None, None, None)


def _launch(
    logits: Tensor, settings: tuple[Tensor, ...], logprobs: Tensor | None, ranks: Tensor | None, finite: Tensor | None
) -> Tensor:
    """The tokens; what else is wanted is filled."""
    rows, vocab = _check(logits)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    config = _config(vocab)
    shares = min(MOST_SHARES, triton.next_power_of_2(triton.cdiv(vocab, config["BLOCK"]))) if rows <= FEW_ROWS else 1
    parts = torch.empty(2, rows, shares, dtype=torch.int64, device=logits.device)
    share = triton.cdiv(vocab, shares * config["BLOCK"]) * config["BLOCK"]
    launch(
        sample_kernel, (rows * shares,), logits, logits.stride(0), *settings, tokens, logprobs, ranks, finite, parts,
        counters(logits.device), V=vocab, SHARES=shares, SHARE=share, **config,
    )  # fmt: skip
    return tokens


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
