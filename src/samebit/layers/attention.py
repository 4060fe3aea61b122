"""Grouped-query attention with head norms, a learned relative bias, and convolved keys and values.

Knows a kernel set, the pools it is handed and their addresses; no model, no request, no mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.kernels.sets import KernelSet
from samebit.kernels.values import AttnIndex, ConvIndex, KvIndex
from samebit.layers.linear import Linear
from samebit.layers.norm import RmsNorm
from samebit.layers.short_conv import ShortConv
from samebit.state.pools import ConvPool, KvPool


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`num_heads` query heads on `num_kv_heads` key/value heads of `head_dim`; `d_rel` relative features a query head.

    `window` W: a query at t sees keys t-W+1 .. t; 0: all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_rel: int
    window: int

    @property
    def widths(self) -> list[int]:
        """Columns of the fused projection: queries, keys and values side by side, relative features."""
        return [self.num_heads * self.head_dim, 2 * self.kv_width, self.num_heads * self.d_rel]

    @property
    def kv_width(self) -> int:
        """Columns of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Where one layer's attention keeps its keys, values and convolution inputs, and this step's addresses there."""

    kv: KvPool
    kv_rows: ConvPool
    conv_index: ConvIndex
    kv_index: KvIndex
    attn_index: AttnIndex


class Attention:
    """[T, H] fp32 in and out.

    `qkvr` maps H to the fused columns of `HeadShape.widths`. Keys and values pass one convolution, which treats each
    channel by itself, and then the keys their norm; heads are normalised one by one, all with one gain.
    score[h, i, j] = (q_i . k_j / head_dim + bias[h, i, i-j]) * tau_i, where the bias at distance d is
    `r_i,h . rel_proj[:, d]` below the extent of `rel_proj` [d_rel, extent] and 0 from there on.
    """

    def __init__(
        self,
        kernels: KernelSet,
        shape: HeadShape,
        qkvr: Linear,
        out: Linear,
        q_norm: RmsNorm,
        k_norm: RmsNorm,
        kv_conv: ShortConv,
        rel_proj: Tensor,
    ) -> None:
        assert q_norm.eps == k_norm.eps, (q_norm.eps, k_norm.eps)
        self._kernels = kernels
        self._shape = shape
        self._qkvr, self._out = qkvr, out
        self._gains, self._eps = (q_norm.gain, k_norm.gain), q_norm.eps
        self._kv_conv = kv_conv
        self._widths = shape.widths
        self._rel_proj = rel_proj.to(getattr(torch, kernels.element)).contiguous()

    def __call__(self, x: Tensor, tau: Tensor, state: AttentionState) -> Tensor:
        q, kv, r = self._qkvr(x).split_with_sizes(self._widths, 1)
        pool, norms = state.kv, (self._gains, self._eps)
        q = self._kv_conv.into_pages(q, kv, state.kv_rows, state.conv_index, *norms, pool, state.kv_index)
        attended = self._kernels.attention(
            q,
            r,
            self._rel_proj,
            tau,
            pool.k,
            pool.v,
            state.attn_index,
            self._shape.window,
            1.0 / self._shape.head_dim,
        )
        return self._out(attended)
