"""Operators made of other operators of a set, for sets that have no kernel of their own for them. Knows no implementation."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def composed(operators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What can be made of a set's operators, by plain name."""
    rms_norm, write_kv, short_conv = operators["rms_norm"], operators["write_kv"], operators["short_conv"]

    def short_conv_norm(
        x: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, query_start: Tensor, read_rows: Tensor,
        read_tags: Tensor, store_rows: Tensor, store_tags: Tensor, write_rows: Tensor, write_tags: Tensor,
        entry_sources: Tensor, entry_source_tags: Tensor, entry_dest: Tensor, entry_tag: Tensor, residual: Tensor,
        gain: Tensor, eps: float, threads: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = short_conv(
            x, taps, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag, residual, threads,
        )  # fmt: skip
        return y, rms_norm(y, gain, eps, threads)

    def add_norm(x: Tensor, y: Tensor, gain: Tensor, eps: float, threads: int) -> tuple[Tensor, Tensor]:
        total = x.float() + y
        return total, rms_norm(total, gain, eps, threads)

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
        threads: int,
    ) -> Tensor:
        normed = rms_norm(k, k_gain, eps, threads)
        write_kv(normed, v, k_pages, v_pages, page_tags, write_slots, stamp_pages, stamp_tags, threads)
        out: Tensor = rms_norm(q, q_gain, eps, threads)
        return out

    return {"short_conv_norm": short_conv_norm, "add_norm": add_norm, "write_heads": write_heads}
