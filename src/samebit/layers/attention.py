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
        """Columns of the fused projection: queries, keys, values, relative features."""
        keys = self.num_kv_heads * self.head_dim
        return [self.num_heads * self.head_dim, keys, keys, self.num_heads * self.d_rel]


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Where one layer's attention keeps its keys, values and convolution inputs, and this step's addresses there."""

    kv: KvPool
    k_rows: ConvPool
    v_rows: ConvPool
    conv_index: ConvIndex
    kv_index: KvIndex
    attn_index: AttnIndex


class Attention:
    """[T, H] fp32 in and out.

    `qkvr` maps H to the fused columns of `HeadShape.widths`. Keys pass their convolution and then their norm; values
    pass theirs and no norm. score[h, i, j] = (q_i . k_j / head_dim + bias[h, i, i-j]) * tau_i, where the bias at
    distance d is `r_i,h . rel_proj[:, d]` below the extent of `rel_proj` [d_rel, extent] and 0 from there on.
    """

    def __init__(
        self,
        kernels: KernelSet,
        shape: HeadShape,
        qkvr: Linear,
        out: Linear,
        q_norm: RmsNorm,
        k_norm: RmsNorm,
        k_conv: ShortConv,
        v_conv: ShortConv,
        rel_proj: Tensor,
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._qkvr, self._out = qkvr, out
        self._q_norm, self._k_norm = q_norm, k_norm
        self._k_conv, self._v_conv = k_conv, v_conv
        self._rel_proj = rel_proj.float().contiguous()

    def __call__(self, x: Tensor, tau: Tensor, state: AttentionState) -> Tensor:
        shape = self._shape
        # Kernels take dense rows; the slices are strided unless T is 1.
        q, k, v, r = (part.contiguous() for part in torch.split(self._qkvr(x), shape.widths, dim=1))
        k = self._k_conv(k, state.k_rows, state.conv_index)
        v = self._v_conv(v, state.v_rows, state.conv_index)
        # Each head is normalised by itself, all heads with one gain.
        k = self._k_norm(k.view(-1, shape.head_dim))
        q = self._q_norm(q.view(-1, shape.head_dim))
        kv, kv_heads = state.kv, (-1, shape.num_kv_heads, shape.head_dim)
        self._kernels.write_kv(k.view(kv_heads), v.view(kv_heads), kv.k, kv.v, kv.page_tags, state.kv_index)
        attended = self._kernels.attention(
            q.view(-1, shape.num_heads, shape.head_dim),
            r.view(-1, shape.num_heads, shape.d_rel),
            self._rel_proj,
            tau,
            kv.k,
            kv.v,
            state.attn_index,
            shape.window,
            1.0 / shape.head_dim,
        )
        return self._out(attended)
