"""Short convolutions on operands of a model's shapes, as cases of `benchmarks.kernel_cases`.

Steps decode, or begin prompts: neither reads what it writes, so a step that is launched again does the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernel_case import Case
from benchmarks.kernel_settings import DTYPE, conv_tiles
from samebit.kernels.triton import conv
from samebit.kernels.values import SINK_ROW, ConvIndex
from samebit.layers.attention import HeadShape

HISTORY, RING = 3, 21
"""Inputs before a token, and pool rows that are kept of a sequence: those of an engine that drafts nothing."""
NEW = -1
"""The tag of pool rows before the step."""


@dataclass(frozen=True, slots=True)
class ConvCase(Case):
    """`rows` batch rows of `tokens` tokens, each behind `start` others; inputs are columns of a tensor of `stride`."""

    channels: int
    stride: int
    has_residual: bool
    rows: int
    start: int
    tokens: int

    modules = (conv,)

    @property
    def name(self) -> str:
        return f"conv {self.channels}{' + residual' if self.has_residual else ''}"

    @property
    def size(self) -> str:
        return f"{self.rows} rows" if self.tokens == 1 else f"{self.rows} x {self.tokens}"

    def chosen(self) -> conv.Tile:
        return conv.tile_of(self.rows * self.tokens, self.rows, self.channels)

    def settings(self) -> list[conv.Tile]:
        return conv_tiles()

    def variant(self, setting: conv.Tile) -> Hashable:
        return "conv", self.channels, self.stride, self.has_residual, self.tokens <= HISTORY, setting

    def label(self, setting: conv.Tile) -> str:
        return f"{setting.channels}x{setting.tokens}/w{setting.num_warps}r{setting.registers}"

    def work(self, part: str) -> tuple[float, float]:
        width = 10 if self.has_residual else 4  # of an element's input, residual and output
        history = HISTORY + min(RING, self.tokens)
        moved = self.rows * (self.tokens * width + 2 * history) * self.channels
        return moved, 2 * (HISTORY + 2) * self.rows * self.tokens * self.channels

    def footprint(self) -> int:
        inputs = 2 * self.stride + (4 * self.channels if self.has_residual else 0)
        return self.rows * (self.tokens * inputs + 2 * (RING + HISTORY) * self.channels)

    def operands(self, device: torch.device) -> tuple[Any, ...]:
        count = self.rows * self.tokens
        x = torch.randn(count, self.stride, dtype=DTYPE, device=device)[:, self.stride - self.channels :]
        taps = torch.randn(HISTORY + 1, self.channels, dtype=DTYPE, device=device)
        pool = torch.randn(2 + self.rows * (RING + HISTORY), self.channels, dtype=DTYPE, device=device)
        pool[0] = 0
        residual = torch.randn(count, self.channels, device=device) if self.has_residual else None
        tags = torch.full(pool.shape[:1], NEW, dtype=torch.int64, device=device)
        index, kept = self._index(device)
        return x, taps, pool, tags, index, residual, kept

    def _index(self, device: torch.device) -> tuple[ConvIndex, Tensor]:
        """Rows that go on, each with a checkpoint at its end if it has enough tokens; and the pool rows that are written."""

        def ints(first: int, end: int) -> Tensor:
            return torch.arange(first, end, dtype=torch.int32, device=device)

        def words(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        def ring_rows(positions: Tensor) -> Tensor:
            places = SINK_ROW + 1 + RING * rows + positions % RING
            return torch.where(positions < 0, 0, places)

        rows, begins = ints(0, self.rows)[:, None], ints(0, self.rows + 1) * self.tokens
        written = ring_rows(ints(self.start, self.start + self.tokens)[None])
        early = max(0, self.tokens - RING)
        ends = SINK_ROW + 1 + RING * self.rows + HISTORY * rows + ints(0, HISTORY)
        has_checkpoint = self.tokens >= HISTORY
        dest = torch.cat([ends if has_checkpoint else torch.full_like(ends, SINK_ROW), torch.full_like(ends, SINK_ROW)])
        sources = begins[1:, None] + ints(-HISTORY, 0)
        kept = torch.cat([written[:, early:].flatten(), *([ends.flatten()] if has_checkpoint else [])])
        late = torch.cat([torch.full_like(written[:, :early], SINK_ROW), written[:, early:]], 1)
        expected = words(self.rows, HISTORY, value=NEW)
        index = ConvIndex(
            query_start=begins,
            read_rows=ring_rows(ints(self.start - HISTORY, self.start)[None]),
            read_tags=expected,
            store_rows=torch.full_like(ends, SINK_ROW),
            store_tags=torch.zeros_like(expected),
            write_rows=late.flatten(),
            write_tags=torch.arange(self.rows * self.tokens, device=device),
            entry_sources=torch.cat([sources, torch.full_like(sources, -1)]),
            entry_source_tags=words(2 * self.rows, HISTORY),
            entry_dest=dest,
            entry_tag=words(2 * self.rows, value=7),
        )
        return index, kept.long()

    def run(self, operands: tuple[Any, ...], setting: conv.Tile) -> Tensor:
        """Outputs, and what the pool then has in the rows that are written, of which nothing was left before."""
        x, taps, pool, tags, index, residual, kept = operands
        pool.index_fill_(0, kept, torch.nan)
        tags.index_fill_(0, kept, NEW)
        fields = [getattr(index, name) for name in ConvIndex.__slots__]
        with patch.object(conv, "tile_of", lambda *_: setting):
            y = conv.short_conv(x, taps, pool, tags, *fields, residual, 1)
        return torch.cat([y.float().flatten(), pool[kept].float().flatten(), tags[kept].float()])


def conv_cases(hidden: int, kinds: Sequence[HeadShape], rows: int, is_decode: bool, start: int) -> list[ConvCase]:
    """Decoding for so many batch rows, or prefill of prompts that have so many tokens together: of outputs, and of keys and values."""
    size = (rows, start, 1) if is_decode else (prompts := 8 if rows >= 2048 else 2, 0, rows // prompts)
    shapes = dict.fromkeys((heads.widths[1], sum(heads.widths)) for heads in kinds)
    return [ConvCase(hidden, hidden, True, *size), *(ConvCase(*shape, False, *size) for shape in shapes)]
