"""Who computes a token: each token's experts and their weights, and the tokens of each expert.

Pairs of a token and a slot are grouped by expert, in order and without a sort. For few tokens all of it is one launch: an expert's
program finds the tokens that chose it from their logits, by how many experts come before it, while a token's program finds its
weights. Very few, or one, are not grouped and need no launch at all: whoever computes a slot finds its expert in this way. For many
tokens the experts of a token are picked one by one, once. All come down to the same scores and weights, so what they round is what is written:
products and sums are not fused. Knows no products.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.triton.filters import image
from samebit.kernels.triton.launch import launch

FEW_PAIRS = 128
"""So many pairs, and fewer, are routed and grouped in one launch."""
FEW_BLOCK = 16
"""Tokens that an expert's program looks at in one step there."""
SCAN = ((512, 4), (4096, 8))
"""Pairs that a program which groups them looks at in one step, and its warps: for few pairs and for many."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a token's experts and weights follow from: ``logits`` [S, T, E + shared] fp32, to be added up over S, in order, and ``bias`` [E]."""

    logits: Tensor
    bias: Tensor
    top_k: int
    num_shared: int
    scale: float

    @property
    def num_slots(self) -> int:
        """Experts of a token."""
        return self.top_k + self.num_shared

    @property
    def num_experts(self) -> int:
        """Routed and shared ones."""
        return self.bias.shape[0] + self.num_shared

    def arguments(self, weights: Tensor, num_warps: int) -> dict[str, Any]:
        """What a kernel of so many warps takes that chooses: where it may put weights [T, slots] fp32, and what it is compiled for."""
        routed = self.bias.shape[0]
        return {
            "logits": self.logits,
            "bias": self.bias,
            "weights": weights,
            "stride": self.logits.stride(1),
            "part_stride": self.logits.stride(0),
            "scale": self.scale,
            "PARTS": self.logits.shape[0],
            "ROUTED": routed,
            "TOP_K": self.top_k,
            "SHARED": self.num_shared,
            "ROUTED_WIDTH": triton.next_power_of_2(routed),
            "SLOTS_WIDTH": triton.next_power_of_2(self.num_slots),
            "THREADS": 32 * num_warps,
        }


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of expert e: from place ``bounds`` [E, 2] int32 [e, 0] to [e, 1] of ``pairs`` int32, ascending; other places hold anything.

    Of tokens that are not grouped there are only ``ids`` [T, slots] int32, the experts of their slots: each pair is at its own place.
    Padding's may be anything. With a ``choice``, they and the tokens' weights are still to be found.
    """

    num_places: int
    pairs: Tensor | None = None
    bounds: Tensor | None = None
    ids: Tensor | None = None
    choice: Choice | None = None


@triton.jit
def scores_of(logit, bias):
    """What experts are chosen by; NaN too is the least: ids stay those of experts."""
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit)) + bias
    return tl.where(score > float("-inf"), score, float("-inf"))


@triton.jit
def weights_of(raw, slot, scale, NUM_SLOTS: tl.constexpr):
    """Weights of a token's slots from their logits, added up in the order of the slots."""
    is_slot = slot < NUM_SLOTS
    log_sigmoid = tl.minimum(raw, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(raw)))
    share = tl.exp(log_sigmoid - tl.max(tl.where(is_slot, log_sigmoid, float("-inf")), 0))
    total = 0.0
    for place in tl.static_range(NUM_SLOTS):
        total += tl.sum(tl.where(slot == place, share, 0.0), 0)
    return tl.div_rn(share, total) * scale


@triton.jit
def rank_of(score, expert, own_score, own):
    """How many experts, along axis 0, come before their ``own``: larger scores, and equal ones of lower experts.

    An expert that is not there is no smaller than those that are, and scores -inf: it comes before none of them.
    """
    is_before = (score > own_score) | ((score == own_score) & (expert < own))
    return tl.sum(is_before.to(tl.int32), 0)


@triton.jit
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    stride,
    scale,
    ROUTED: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    ROUTED_WIDTH: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr,
):
    """Experts and weights of one token; ROUTED_WIDTH and SLOTS_WIDTH are powers of two that hold all experts and all slots."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, ROUTED_WIDTH), tl.arange(0, SLOTS_WIDTH)
    logit = tl.load(logits + row * stride + expert, mask=expert < ROUTED, other=0.0)
    score = scores_of(logit, tl.load(bias + expert, mask=expert < ROUTED, other=0.0))
    is_left = expert < ROUTED
    # Shared experts follow; the places of chosen ones are overwritten.
    chosen = ROUTED + slot - TOP_K
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_left, score, float("-inf")), 0)
        winner = tl.min(tl.where(is_left & (score == best), expert, ROUTED_WIDTH), 0)
        is_left = is_left & (expert != winner)
        chosen = tl.where(slot == place, winner, chosen)
    is_slot = slot < TOP_K + SHARED
    raw = tl.load(logits + row * stride + chosen, mask=is_slot, other=0.0)
    at = row * (TOP_K + SHARED) + slot
    tl.store(ids + at, chosen, mask=is_slot)
    tl.store(weights + at, weights_of(raw, slot, scale, TOP_K + SHARED), mask=is_slot)


def route(
    logits: Tensor, bias: Tensor, top_k: int, num_shared: int, scale: float, threads: int
) -> tuple[Tensor, Tensor]:
    """The twin's experts and weights for ``logits`` [T, E + shared] fp32; a row that is not finite gets some valid ids."""
    num_rows, slots = logits.shape[0], top_k + num_shared
    ids = torch.empty((num_rows, slots), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, slots), dtype=torch.float32, device=logits.device)
    launch(
        route_kernel,
        (num_rows,),
        logits, bias, ids, weights, logits.stride(0), scale,
        ROUTED=bias.shape[0],
        TOP_K=top_k,
        SHARED=num_shared,
        ROUTED_WIDTH=triton.next_power_of_2(bias.shape[0]),
        SLOTS_WIDTH=triton.next_power_of_2(slots),
        num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def group_kernel(expert_ids, num_tokens, pairs, bounds, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the live pairs of expert ``program_id`` to ``pairs``, in order, and the bounds of where they lie."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    num_pairs = tl.load(num_tokens) * SLOTS
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    own = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + place
        found = tl.load(expert_ids + pair, mask=pair < num_pairs, other=2147483647)
        below += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    start = tl.sum(below, 0)
    count = tl.sum(own, 0)
    tl.store(bounds + 2 * expert, start)
    tl.store(bounds + 2 * expert + 1, start + count)
    if count > 0:
        written = start
        for first in range(0, num_pairs, BLOCK):
            pair = first + place
            found = tl.load(expert_ids + pair, mask=pair < num_pairs, other=2147483647)
            is_own = (found == expert).to(tl.int32)
            tl.store(pairs + written + tl.cumsum(is_own, 0) - 1, pair, mask=is_own == 1)
            written += tl.sum(is_own, 0)


def group(expert_ids: Tensor, num_tokens: Tensor, num_experts: int) -> Groups:
    """The pairs of ``expert_ids`` [T, slots] int32, of the first ``num_tokens`` [1] tokens, by expert; one's follow another's."""
    num_rows, slots = expert_ids.shape
    pairs = torch.empty(num_rows * slots, dtype=torch.int32, device=expert_ids.device)
    bounds = torch.empty((num_experts, 2), dtype=torch.int32, device=expert_ids.device)
    block, num_warps = SCAN[pairs.shape[0] > SCAN[0][0]]
    launch(
        group_kernel,
        (num_experts if num_rows else 0,),
        expert_ids, num_tokens, pairs, bounds, SLOTS=slots, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return Groups(pairs.shape[0], pairs, bounds)


@triton.jit
def load_sums(addends, at, mask, part_stride, PARTS: tl.constexpr):
    """The sums of PARTS addends, in their order, that lie ``part_stride`` apart; zeros where nothing is."""
    total = 0.0
    for part in tl.static_range(PARTS):
        total += tl.load(addends + part * part_stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def ranked(
    logits, bias, row, stride, part_stride, PARTS: tl.constexpr, ROUTED: tl.constexpr, WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """The routed experts [WIDTH], a token's logits of them, and how many of them come before each; all ranks are different.

    They are compared as numbers that order them as ``rank_of`` does, since few instructions matter in a program that runs through them
    once. They are loaded as one for each thread at least: Triton repeats loads of fewer in each layout that is needed.
    """
    LOADED: tl.constexpr = max(THREADS, WIDTH)
    place = tl.arange(0, LOADED)
    logit = load_sums(logits, row * stride + place, place < ROUTED, part_stride, PARTS)
    score = scores_of(logit, tl.load(bias + place, mask=place < ROUTED, other=float("-inf")))
    key = (image(score).to(tl.int64) << 32) | (LOADED - 1 - place).to(tl.int64)
    # What lies behind the experts comes before none of them.
    key = tl.max(tl.reshape(key, (LOADED // WIDTH, WIDTH)), 0)
    logit = tl.sum(tl.reshape(tl.where(place < WIDTH, logit, 0.0), (LOADED // WIDTH, WIDTH)), 0)
    return tl.arange(0, WIDTH), logit, tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)


@triton.jit
def expert_of(
    slot, logits, bias, row, stride, part_stride,
    PARTS: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The expert of a slot of one token, whatever its logits are."""
    expert, _, rank = ranked(logits, bias, row, stride, part_stride, PARTS, ROUTED, WIDTH, THREADS)
    return tl.where(slot < TOP_K, tl.sum(tl.where(rank == slot, expert, 0), 0), ROUTED + slot - TOP_K)


@triton.jit
def weigh(
    logits,
    bias,
    weights,
    ids,
    row,
    stride,
    part_stride,
    scale,
    PARTS: tl.constexpr,
    ROUTED: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Weights of one token, as ``route_kernel`` finds them, and its experts, as ``expert_of``, where ``ids`` are wanted."""
    slot = tl.arange(0, SLOTS_WIDTH)
    is_shared = (slot >= TOP_K) & (slot < TOP_K + SHARED)
    shared = load_sums(logits, row * stride + ROUTED + slot - TOP_K, is_shared, part_stride, PARTS)
    expert, logit, rank = ranked(logits, bias, row, stride, part_stride, PARTS, ROUTED, WIDTH, THREADS)
    if ids is not None:
        tl.store(ids + row * (TOP_K + SHARED) + rank, expert, mask=rank < TOP_K)
        tl.store(ids + row * (TOP_K + SHARED) + slot, ROUTED + slot - TOP_K, mask=is_shared)
    raw = tl.sum(tl.where(rank[:, None] == slot[None, :], logit[:, None], 0.0), 0)
    weight = weights_of(tl.where(slot < TOP_K, raw, shared), slot, scale, TOP_K + SHARED)
    tl.store(weights + row * (TOP_K + SHARED) + slot, weight, mask=slot < TOP_K + SHARED)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_tokens"])
def assign_kernel(
    logits,
    bias,
    num_tokens,
    weights,
    pairs,
    bounds,
    num_rows,
    stride,
    part_stride,
    scale,
    PARTS: tl.constexpr,
    ROUTED: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    ROUTED_WIDTH: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of token ``program_id``; behind the tokens, an expert's pairs, to its own ``num_rows`` places."""
    if tl.program_id(0) < num_rows:
        weigh(
            logits, bias, weights, None, tl.program_id(0), stride, part_stride, scale,
            PARTS, ROUTED, TOP_K, SHARED, ROUTED_WIDTH, SLOTS_WIDTH, THREADS,
        )  # fmt: skip
    else:
        own = tl.program_id(0) - num_rows
        live = tl.load(num_tokens)
        expert = tl.arange(0, ROUTED_WIDTH)[:, None]
        biases = tl.load(bias + expert, mask=expert < ROUTED, other=float("-inf"))
        written = own * num_rows
        tl.store(bounds + 2 * own, written)
        for first in range(0, num_rows, BLOCK):
            token = first + tl.arange(0, BLOCK)
            is_there = (expert < ROUTED) & (token < num_rows)[None, :]
            score = scores_of(load_sums(logits, token[None, :] * stride + expert, is_there, part_stride, PARTS), biases)
            own_score = tl.max(tl.where(expert == own, score, float("-inf")), 0)
            rank = rank_of(score, expert, own_score[None, :], own)
            is_own = ((token < live) & ((rank < TOP_K) | (own >= ROUTED))).to(tl.int32)
            slot = tl.where(own < ROUTED, rank, TOP_K + own - ROUTED)
            to = pairs + written + tl.cumsum(is_own, 0) - 1
            tl.store(to, token * (TOP_K + SHARED) + slot, mask=is_own == 1)
            written += tl.sum(is_own, 0)
        tl.store(bounds + 2 * own + 1, written)


def assign(choice: Choice, num_tokens: Tensor) -> tuple[Groups, Tensor]:
    """``route`` and ``group`` of its ids in one launch: the groups, each at its own T places, and the weights [T, slots] fp32."""
    logits, num_experts = choice.logits, choice.num_experts
    num_rows = logits.shape[1]
    weights = torch.empty((num_rows, choice.num_slots), dtype=torch.float32, device=logits.device)
    pairs, bounds = (
        torch.empty(shape, dtype=torch.int32, device=logits.device)
        for shape in (num_experts * num_rows, (num_experts, 2))
    )
    # A thread for each expert that is compared with the others.
    num_warps = max(1, min(16, triton.next_power_of_2(choice.bias.shape[0]) // 32))
    launch(
        assign_kernel,
        (num_rows + num_experts if num_rows else 0,),
        num_tokens=num_tokens, pairs=pairs, bounds=bounds, num_rows=num_rows,
        BLOCK=min(FEW_BLOCK, triton.next_power_of_2(num_rows)), num_warps=num_warps, enable_fp_fusion=False,
        **choice.arguments(weights, num_warps),
    )  # fmt: skip
    return Groups(pairs.shape[0], pairs, bounds), weights


def ungrouped(choice: Choice) -> tuple[Groups, Tensor]:
    """No groups of tokens whose choice is still to be made, and room for their weights [T, slots] fp32, which whoever makes it fills."""
    shape, device = (choice.logits.shape[1], choice.num_slots), choice.logits.device
    ids, weights = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    return Groups(ids.numel(), ids=ids, choice=choice), weights
