"""Kernels on operands of a model's shapes: what can be launched, in which settings, and what it must move and compute.

Operands are random; on the meta device they are shapes only. A setting is what a kernel's own table would say: a tile, or how
attention is cut. It is put in the table's place for one call, so that all else is as an engine does it. Knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernel_case import Case
from benchmarks.kernel_conv import conv_cases
from benchmarks.kernel_settings import (
    DTYPE,
    attention_settings,
    chunk_fields,
    expert_tiles,
    linear_tiles,
)
from benchmarks.models import config_json
from samebit.kernels.triton import attention, experts, linear, token_experts
from samebit.layers.attention import HeadShape
from samebit.models.inkling_config import InklingConfig, parse_config

# So small that Triton's interpreter takes seconds for it.
SMOKE = {
    "hidden_size": 64, "num_hidden_layers": 2, "local_layer_ids": [0], "num_attention_heads": 2, "num_key_value_heads": 1,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "head_dim": 16, "swa_head_dim": 16, "d_rel": 2,
    "rel_extent": 32, "sliding_window_size": 20, "dense_intermediate_size": 48, "intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 96, "unpadded_vocab_size": 90, "model_max_length": 256,
}  # fmt: skip


def model_config(name: str, *, smoke: bool = False) -> InklingConfig:
    """The configuration of a model of `benchmarks.models`, or one of toy sizes."""
    raw = config_json(name)
    if smoke:
        raw["text_config"] |= SMOKE
    return parse_config(raw)


def normal(device: torch.device, *shape: int) -> Tensor:
    """Random values."""
    return torch.empty(shape, dtype=DTYPE, device=device).normal_()


@dataclass(frozen=True, slots=True)
class Product:
    """A linear map of a model: its weight is [num_out, num_in], its result fp32 if `wide`."""

    name: str
    num_out: int
    num_in: int
    wide: bool = False


def heads_of(config: InklingConfig, *, window: bool) -> HeadShape:
    """The heads of the layers of a kind."""
    if window:
        counts = config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim
        return HeadShape(*counts, config.d_rel, config.sliding_window_size)
    return HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.d_rel, 0)


def products(config: InklingConfig) -> list[Product]:
    """The linear maps of a model, one of each shape."""
    window, full = heads_of(config, window=True), heads_of(config, window=False)
    hidden, dense = config.hidden_size, config.dense_intermediate_size
    return [
        Product("qkvr of window layers", sum(window.widths), hidden),
        Product("qkvr of full layers", sum(full.widths), hidden),
        Product("out", hidden, full.num_heads * full.head_dim),
        Product("router", config.n_routed_experts + config.n_shared_experts, hidden, wide=True),
        Product("dense gate_up", 2 * dense, hidden),
        Product("dense down", hidden, dense),
        Product("head", config.unpadded_vocab_size, hidden, wide=True),
    ]


@dataclass(frozen=True, slots=True)
class LinearCase(Case):
    """A linear map of `rows` tokens."""

    product: Product
    rows: int

    modules = (linear,)

    @property
    def name(self) -> str:
        return f"linear {self.product.name}"

    @property
    def size(self) -> str:
        return str(self.rows)

    def chosen(self) -> linear.Tile:
        return linear.tile_of(self.rows, self.product.num_out, self.product.num_in, DTYPE)

    def settings(self) -> list[linear.Tile]:
        return linear_tiles(self.rows)

    def variant(self, setting: linear.Tile) -> Hashable:
        product = self.product
        span = linear.whole_span(setting.span, product.num_in, DTYPE)
        segments = linear.num_segments(product.num_out, product.num_in, DTYPE)
        return "linear", product.wide, product.num_out % 16, product.num_in % 64, segments, replace(setting, span=span)

    def label(self, setting: linear.Tile) -> str:
        return f"{setting.weights}x{setting.tokens}x{setting.span}/w{setting.num_warps}s{setting.num_stages}"

    def work(self, part: str) -> tuple[float, float]:
        num_out, num_in, result = self.product.num_out, self.product.num_in, 4 if self.product.wide else 2
        return 2 * num_in * (num_out + self.rows) + result * self.rows * num_out, 2 * self.rows * num_out * num_in

    def footprint(self) -> int:
        return 2 * self.product.num_in * (self.product.num_out + self.rows)

    def operands(self, device: torch.device) -> tuple[Tensor, Tensor]:
        num_out, num_in = self.product.num_out, self.product.num_in
        return normal(device, self.rows, num_in), normal(device, num_out, num_in)

    def run(self, operands: tuple[Tensor, Tensor], setting: linear.Tile) -> Tensor:
        x, weight = operands
        with patch.object(linear, "tile_of", lambda *_: setting):
            return linear.linear(DTYPE, x, weight, self.product.num_out, self.product.wide, 1)


@dataclass(frozen=True, slots=True)
class ExpertsCase(Case):
    """The experts of a layer for `rows` tokens, each routed to random ones."""

    config: InklingConfig
    rows: int

    modules = (experts, token_experts)

    @property
    def name(self) -> str:
        return "experts"

    @property
    def size(self) -> str:
        return str(self.rows)

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return {"gate_up": ("gate_up_kernel",), "down": ("down_kernel", "down_of_tokens_kernel")}

    @property
    def num_experts(self) -> int:
        return self.config.n_routed_experts + self.config.n_shared_experts

    @property
    def num_pairs(self) -> int:
        return self.rows * (self.config.num_experts_per_tok + self.config.n_shared_experts)

    def chosen(self) -> experts.Tiles:
        return experts.tiles_of(self.num_pairs, self.num_experts, self.config.moe_intermediate_size, DTYPE)

    def settings(self) -> list[experts.Tiles]:
        return [experts.Tiles(tile, tile) for tile in expert_tiles(self.num_pairs / self.num_experts)]

    def variant(self, setting: experts.Tiles) -> Hashable:
        return "experts", self.num_experts, replace(setting.gate_up, programs=0), replace(setting.down, programs=0)

    def label(self, setting: experts.Tiles) -> str:
        tiles = dict.fromkeys((setting.gate_up, setting.down))
        return " and ".join(
            f"{tile.rows}x{tile.tokens}x{tile.span}/w{tile.num_warps}s{tile.num_stages}p{tile.programs}"
            for tile in tiles
        )

    def work(self, part: str) -> tuple[float, float]:
        config, pairs = self.config, self.num_pairs
        missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** self.rows
        in_use = config.n_routed_experts * (1 - missed) + config.n_shared_experts  # on average
        size = config.hidden_size * config.moe_intermediate_size * (2 if part == "gate_up" else 1)
        inner = 2 * pairs * config.moe_intermediate_size
        outer = config.hidden_size * (2 * self.rows if part == "gate_up" else 4 * pairs)
        return 2 * in_use * size + inner + outer, 2 * pairs * size

    def footprint(self) -> int:
        return 6 * self.num_experts * self.config.hidden_size * self.config.moe_intermediate_size

    def operands(self, device: torch.device) -> tuple[Tensor, ...]:
        config, shared = self.config, self.config.n_shared_experts
        routed = torch.rand(self.rows, config.n_routed_experts, device=device).topk(config.num_experts_per_tok).indices
        always = torch.arange(config.n_routed_experts, self.num_experts, device=device).expand(self.rows, shared)
        ids = torch.cat([routed, always], 1).int().contiguous()
        return (
            normal(device, self.rows, config.hidden_size),
            ids,
            torch.rand(ids.shape, device=device),
            torch.full((1,), self.rows, dtype=torch.int32, device=device),
            normal(device, self.num_experts, 2 * config.moe_intermediate_size, config.hidden_size) / 64,
            normal(device, self.num_experts, config.hidden_size, config.moe_intermediate_size) / 64,
        )

    def run(self, operands: tuple[Tensor, ...], setting: experts.Tiles) -> Tensor:
        with patch.object(experts, "tiles_of", lambda *_: setting):
            return experts.moe(*operands, self.config.moe_intermediate_size, 1)


@dataclass(frozen=True, slots=True)
class AttentionCase(Case):
    """Attention of `rows` batch rows of `tokens` tokens, each behind `start` others."""

    heads: HeadShape
    extent: int
    rows: int
    start: int
    tokens: int
    max_length: int
    page_size: int = 16

    modules = (attention,)

    @property
    def name(self) -> str:
        return f"attention, {'window' if self.heads.window else 'full'}"

    @property
    def size(self) -> str:
        return f"{self.rows} rows" if self.tokens == 1 else f"{self.rows} x {self.tokens}"

    def chosen(self) -> attention.Tiling:
        return attention.TILINGS[DTYPE]

    def settings(self) -> list[attention.Tiling]:
        return attention_settings(self.chosen(), is_window=self.heads.window > 0, is_decode=self.tokens == 1)

    def variant(self, setting: attention.Tiling) -> Hashable:
        has_long = self.rows * self.tokens * self.heads.num_heads // self.heads.num_kv_heads > setting.short_rows
        places = max(16, 1 << (self.rows - 1).bit_length())
        return "attention", self.heads, places, has_long, setting

    def order(self, setting: attention.Tiling) -> Hashable:
        return tuple(getattr(setting, name) for name in ("block_n", *chunk_fields()))

    def label(self, setting: attention.Tiling) -> str:
        now = self.chosen()
        names = [field.name for field in fields(setting)]
        changed = [f"{name}={getattr(setting, name)}" for name in names if getattr(setting, name) != getattr(now, name)]
        return " ".join(changed) or "as it is"

    def work(self, part: str) -> tuple[float, float]:
        heads, reach = self.heads, self.heads.window or math.inf
        seen = sum(min(self.start + i + 1, reach) for i in range(self.tokens))
        kept = min(self.start + self.tokens, reach + self.tokens - 1)
        moved = 2 * kept * heads.kv_width + 2 * self.tokens * heads.num_heads * heads.head_dim
        return 2 * self.rows * moved, 4 * self.rows * seen * heads.num_heads * heads.head_dim

    def footprint(self) -> int:
        length = self.start + self.tokens
        return 4 * self.rows * (length * self.heads.kv_width + self.tokens * sum(self.heads.widths))

    def operands(self, device: torch.device) -> tuple[Any, ...]:
        heads, count = self.heads, self.rows * self.tokens
        fused = normal(device, count, sum(heads.widths))
        held = -(-(self.start + self.tokens) // self.page_size)
        table = torch.zeros(self.rows, -(-self.max_length // self.page_size), dtype=torch.int32, device=device)
        table[:, :held] = torch.rand(self.rows * held, device=device).argsort().view(self.rows, held)
        pages = (self.rows * held, heads.num_kv_heads, self.page_size, heads.head_dim)
        slots = torch.arange(self.rows + 1, dtype=torch.int32, device=device)
        q = normal(device, count, heads.num_heads * heads.head_dim)
        rows = attention.Rows(
            slots * self.tokens, torch.full_like(slots[1:], self.start), slots[:-1], table, self.tokens, 0, True, q, q
        )
        return (
            q,
            fused[:, -heads.widths[-1] :],
            normal(device, heads.d_rel, self.extent),
            torch.ones(count, device=device),
            normal(device, *pages),
            normal(device, *pages),
            rows,
            heads.window,
            1.0 / heads.head_dim,
        )

    def run(self, operands: tuple[Any, ...], setting: attention.Tiling) -> Tensor:
        return attention.attend(*operands, setting)


def kernel_cases(config: InklingConfig, kinds: Iterable[str], *, smoke: bool = False) -> list[Case]:
    """All cases of these kinds (linear, experts, attention, conv): what a step of few tokens waits for comes first."""
    window, full = heads_of(config, window=True), heads_of(config, window=False)
    decode, prefill = ((1, 32, 128, 8), (8192, 2048)) if not smoke else ((1,), (20,))
    start, longest = (543, 2560) if not smoke else (37, 64)
    cases: list[Case] = []
    for rows in (*decode, *prefill):
        if "experts" in kinds:
            cases.append(ExpertsCase(config, rows))
        if "linear" in kinds:
            few = rows in decode  # a head sees a row for each answer, not for each token of a prompt
            cases += [LinearCase(product, rows) for product in products(config) if few or product.name != "head"]
        if "attention" in kinds:
            cases += attention_cases((window, full), config.rel_extent, rows, rows in decode, start, longest)
        if "conv" in kinds:
            cases += conv_cases(config.hidden_size, (window, full), rows, rows in decode, start)
    return cases


def attention_cases(
    kinds: Sequence[HeadShape], extent: int, rows: int, is_decode: bool, start: int, longest: int
) -> list[Case]:
    """Decoding for so many batch rows, or prefill of eight prompts that have twice as many tokens together."""
    if is_decode:
        return [AttentionCase(heads, extent, rows, start, 1, longest) for heads in kinds]
    prompts = 8 if rows >= 8192 else 2
    tokens = 2048 if rows >= 8192 else rows // 2
    return [AttentionCase(heads, extent, prompts, 0, tokens, longest) for heads in kinds]
