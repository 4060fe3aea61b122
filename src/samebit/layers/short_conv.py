"""Depthwise causal short convolution over a pool of input rows. Knows a kernel set and no model."""

from __future__ import annotations

from torch import Tensor

from samebit.kernels.sets import KernelSet
from samebit.kernels.values import ConvIndex, KvIndex
from samebit.layers.norm import RmsNorm
from samebit.state.pools import ConvPool, KvPool


class ShortConv:
    """`y[t] = x[t] + sum_j taps[:, j] x[t-K+1+j] (+ residual[t])` for `x` [T, C] fp32 and taps [C, K].

    Columns are channels; rows of `x` may lie apart. Inputs before the step come from `pool`; the step's inputs and its
    checkpoint entries go there.
    """

    def __init__(self, kernels: KernelSet, taps: Tensor) -> None:
        self._kernels = kernels
        self._taps = taps.float().T.contiguous()

    def __call__(self, x: Tensor, pool: ConvPool, index: ConvIndex, residual: Tensor | None = None) -> Tensor:
        return self._kernels.short_conv(x, self._taps, pool.rows, pool.row_tags, index, residual)

    def normed(
        self, x: Tensor, pool: ConvPool, index: ConvIndex, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[Tensor, Tensor]:
        """The outputs, and what `norm` makes of them; they themselves without one."""
        if norm is None:
            y = self(x, pool, index, residual)
            return y, y
        rows, tags = pool.rows, pool.row_tags
        return self._kernels.short_conv_norm(x, self._taps, rows, tags, index, residual, norm.gain, norm.eps)

    def into_pages(
        self,
        q: Tensor,
        kv: Tensor,
        pool: ConvPool,
        index: ConvIndex,
        gains: tuple[Tensor, Tensor],
        eps: float,
        pages: KvPool,
        kv_index: KvIndex,
    ) -> Tensor:
        """Queries `q` [T, heads * hd] normed head by head; the outputs for `kv` [T, 2 kv_heads * hd], keys and values side by side, go into
        `pages`, the keys' normed. `gains` [hd] are those of queries and keys.
        """
        places = pages.k, pages.v, pages.page_tags, kv_index
        return self._kernels.conv_heads(q, kv, self._taps, pool.rows, pool.row_tags, index, gains, eps, *places)
