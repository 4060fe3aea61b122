"""Operators made of other functions of a set, or of torch's, for sets that have no kernel of their own for them."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from samebit.kernels import torch_words


def composed(operators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What can be made of a set's functions, by plain name; those that it takes need be there only when it is called."""

    def draw(
        logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
        sample_index: Tensor, position: Tensor, target: Tensor, threads: int,
    ) -> Tensor:  # fmt: skip
        settings = temperature, top_k, top_p, min_p, seed, sample_index, position, target
        tokens: Tensor = operators["sample"](logits, *settings, threads)[0]
        return tokens

    of_others = {**_of_products(operators), **_of_convolutions_and_heads(operators)}
    return {**torch_words.IMPLEMENTATIONS, **of_others, "draw": draw}


def _of_products(operators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Products, what goes before them and what follows."""

    def add_norm(x: Tensor, y: Tensor, gain: Tensor, eps: float, threads: int) -> tuple[Tensor, Tensor]:
        total = x.float() + y
        return total, operators["rms_norm"](total, gain, eps, threads)

    def normed_linear(
        x: Tensor,
        y: Tensor,
        gain: Tensor,
        eps: float,
        weight: Tensor,
        num_out: int,
        library: bool,
        is_gated: bool,
        threads: int,
    ) -> tuple[Tensor, Tensor]:
        total, normed = add_norm(x, y, gain, eps, threads)
        product: Tensor = operators["linear"](normed, weight, num_out, False, library, threads)
        return total, operators["swiglu"](product, threads) if is_gated else product

    def addends(x: Tensor, weight: Tensor, num_out: int, library: bool, threads: int) -> Tensor:
        product: Tensor = operators["linear"](x, weight, num_out, True, library, threads)
        return product[None]

    def mixture(
        x: Tensor,
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        num_shared: int,
        scale: float,
        num_tokens: Tensor,
        w13: Tensor,
        w2: Tensor,
        intermediate: int,
        threads: int,
    ) -> Tensor:
        expert_ids, weights = operators["route"](in_order(logits), bias, top_k, num_shared, scale, threads)
        out: Tensor = operators["moe"](x, expert_ids, weights, num_tokens, w13, w2, intermediate, threads)
        return out

    return {
        "add_norm": add_norm,
        "normed_linear": normed_linear,
        "addends": addends,
        "mixture": mixture,
    }


def _of_convolutions_and_heads(operators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Convolutions and heads, with their norms."""
    rms_norm = operators["rms_norm"]

    def short_conv_norm(
        x: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor,
        read_tags: Tensor, store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor,
        entry_sources: Tensor, entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, residual: Tensor,
        gain: Tensor, eps: float, threads: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = operators["short_conv"](
            x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag, residual, threads,
        )  # fmt: skip
        return y, rms_norm(y, gain, eps, threads)

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
        def normed(x: Tensor, gain: Tensor) -> Tensor:
            out: Tensor = rms_norm(x, gain, eps, threads) if x.shape[1] else x.clone()
            return out if positions is None or cos is None or sin is None else turned(out, positions, cos, sin)

        keys = normed(k, k_gain)
        operators["write_kv"](keys, v, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags, threads)
        return normed(q, q_gain)

    def conv_heads(
        q: Tensor, kv: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor,
        read_tags: Tensor, store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor,
        entry_sources: Tensor, entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, q_gain: Tensor,
        k_gain: Tensor, eps: float, k_pages: Tensor, v_pages: Tensor, page_tags: Tensor, write_slots: Tensor,
        stamp_pages: Tensor, stamp_tags: Tensor, threads: int,
    ) -> Tensor:  # fmt: skip
        k, v = operators["short_conv"](
            kv, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag, None, threads,
        ).chunk(2, 1)  # fmt: skip
        return write_heads(
            q, k, v, q_gain, k_gain, eps, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags, None, None,
            None, threads,
        )  # fmt: skip

    def turn_heads(
        x: Tensor, gains: Tensor, eps: float, positions: Tensor, cos: Tensor, sin: Tensor, threads: int
    ) -> Tensor:
        # A gain of one changes no bit.
        normed: Tensor = rms_norm(x, torch.ones_like(gains[0]), eps, threads)
        return turned(normed * gains.flatten(), positions, cos, sin)

    return {
        "short_conv_norm": short_conv_norm,
        "write_heads": write_heads,
        "conv_heads": conv_heads,
        "turn_heads": turn_heads,
    }


def in_order(addends: Tensor) -> Tensor:
    """The sum of ``addends`` [S, ...], one after the other."""
    total: Tensor = reduce(torch.add, addends)
    return total


def turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads side by side, ``x`` [T, n * hd], turned as ``Turn`` says."""
    heads = x.unflatten(1, (x.shape[1] // cos.shape[1], cos.shape[1]))
    first, second = heads.chunk(2, dim=2)
    exchanged = torch.cat([second, first], dim=2)
    out: Tensor = heads * cos[positions][:, None] + exchanged * sin[positions][:, None]
    return out.flatten(1)
